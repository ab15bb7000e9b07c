"""Make crawler.json: the gait of a soft crawler, learnt by gradients through friction.

The file holds the settings, the commit, the travel before every update and the learnt
amplitudes and phases; plot_crawler.py draws it and runs the gait again. Nothing is
random, so there is no seed. Training takes some minutes.
Run: python examples/data/make_crawler.py
"""

import json
import subprocess
import time
from pathlib import Path

import torch
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim.core.durable.files import replacing

FILE = Path(__file__).with_name("crawler.json")
SETTINGS = {
    # m, s, kg; a plane body of thickness 1 m.
    "lengths": [1.0, 0.2],
    "cells": [10, 2],
    "density": 1000.0,
    "youngs_modulus": 5e4,
    "poissons_ratio": 0.3,
    "g": 9.81,
    "friction": 0.5,
    "smoothing": 0.04,
    "damping": 2.0,
    "contact_stiffness": 5e4,
    "contact_width": 0.002,
    "frequency": 1.0,
    "largest_amplitude": 0.2,
    "first_amplitude": 0.1,
    "dt": 0.0025,
    "time": 3.0,
    "updates": 60,
    "rate": 0.1,
}


def make_mesh(lengths, cells):
    """Make a rectangle that is its own mirror image, and the cell of each triangle."""
    columns, rows = cells
    grid = adjsim.meshes.sheet(lengths, cells, dim=2).vertices
    triangles, owners = [], []
    for i in range(columns):
        for j in range(rows):
            a, b = i * (rows + 1) + j, (i + 1) * (rows + 1) + j
            rising = [[a, b, b + 1], [a, b + 1, a + 1]]
            falling = [[a, b, a + 1], [b, b + 1, a + 1]]
            triangles += rising if i < columns // 2 else falling
            owners += 2 * [i * rows + j]
    return adjsim.meshes.Mesh(grid, triangles=triangles), torch.tensor(owners)


class Gait(torch.nn.Module):
    """Amplitude and phase of the muscle in each cell."""

    def __init__(self, cells, first, largest):
        super().__init__()
        self.amplitude = torch.nn.Parameter(torch.full((cells,), first))
        self.phase = torch.nn.Parameter(torch.zeros(cells))
        register_parametrization(self, "amplitude", adjsim.Between(0.0, largest))


def make_crawler(mesh, owners, amplitude, phase, settings):
    """Make the dynamics of the body with muscles along it."""
    wave, turn = (
        torch.stack([x[owners], torch.zeros(len(owners))], -1)[None]
        for x in (amplitude, phase)
    )
    muscles = adjsim.Harmonics(wave, settings["frequency"], turn, 1.0)
    body = adjsim.NeoHookean(
        mesh,
        settings["youngs_modulus"],
        settings["poissons_ratio"],
        rest_stretch=torch.ones(len(owners), 2),
    )
    mass = mesh.lumped_mass(settings["density"])
    floor = adjsim.PlaneContact(
        [0.0, 1.0], 0.0, settings["contact_stiffness"], settings["contact_width"]
    )
    return adjsim.Mechanics(
        adjsim.Actuated(body, rest_stretch=muscles)
        + adjsim.Gravity(mass, settings["g"]),
        mass,
        contact=floor,
        friction=settings["friction"],
        smoothing=settings["smoothing"],
        damping=settings["damping"],
    )


def run(dynamics, mesh, settings):
    """Return how far the centre of mass travels."""
    state = dynamics.init(mesh.vertices)
    final = adjsim.simulate(
        dynamics,
        state,
        [0.0, settings["time"]],
        solver=adjsim.Splitting(dynamics.scheme, settings["dt"]),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    ).final
    mass = mesh.lumped_mass(settings["density"])
    return mass @ (final.position - mesh.vertices)[:, 0] / mass.sum()


def train(settings):
    """Learn the gait by Adam and return it, with the travel before every update."""
    mesh, owners = make_mesh(settings["lengths"], settings["cells"])
    columns, rows = settings["cells"]
    gait = Gait(
        columns * rows, settings["first_amplitude"], settings["largest_amplitude"]
    )
    optimizer = torch.optim.Adam(gait.parameters(), lr=settings["rate"])
    history, begin = [], time.time()
    for update in range(settings["updates"] + 1):
        dynamics = make_crawler(mesh, owners, gait.amplitude, gait.phase, settings)
        travel = run(dynamics, mesh, settings)
        history.append(float(travel.detach()))
        if update % 10 == 0:
            seconds = time.time() - begin
            print(f"{update}: travel {history[-1]:.4f} m, {seconds:.0f} s", flush=True)
        if update < settings["updates"]:
            optimizer.zero_grad()
            (-travel).backward()
            optimizer.step()
    return gait, history


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    gait, history = train(SETTINGS)
    study = {
        "made_by": "examples/data/make_crawler.py",
        "commit": commit,
        "settings": SETTINGS,
        "travel": [round(value, 9) for value in history],
        "amplitude": gait.amplitude.tolist(),
        "phase": gait.phase.tolist(),
    }
    with replacing(FILE) as temporary:
        temporary.write_text(json.dumps(study, indent=1) + "\n")


if __name__ == "__main__":
    main()
