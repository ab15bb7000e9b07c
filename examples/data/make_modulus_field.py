"""Make modulus_field.json: a field of Young's modulus from the motion of a surface.

The file holds the settings, the seed, the commit and, for every strength of the
regularisation, the misfits and the field; plot_identify_material.py draws it and runs
the best one. It takes some minutes. Run: python examples/data/make_modulus_field.py
"""

import json
import math
import subprocess
from pathlib import Path

import torch
from scipy.optimize import minimize
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim import meshes
from adjsim.core.durable.files import replacing

FILE = Path(__file__).with_name("modulus_field.json")
SETTINGS = {
    "lengths": [0.4, 0.4, 0.04],
    "cells": [10, 10, 1],
    "density": 1000.0,
    "ratio": 0.4,
    # Young's modulus of the slab, of the disc in it, and the disc's centre and radius.
    # The modulus changes between them over about twice the width.
    "soft": 1e5,
    "stiff": 5e5,
    "centre": [0.23, 0.18],
    "radius": 0.1,
    "width": 0.015,
    "speed": 2.0,
    "dt": 4e-4,
    "frames": 40,
    "steps_per_frame": 4,
    "noise": 3e-4,
    # Every fourth frame is held out.
    "held_out": 4,
    "strengths": [100.0, 30.0, 10.0, 3.0, 1.0, 0.1],
    "start": 2e5,
    "iterations": 45,
    "seed": 7,
}
mesh = meshes.box(SETTINGS["lengths"], SETTINGS["cells"])
LENGTH, WIDTH, THICKNESS = SETTINGS["lengths"]
FRAMES = SETTINGS["frames"]
TIMES = SETTINGS["dt"] * SETTINGS["steps_per_frame"] * torch.arange(FRAMES + 1)
# The camera sees the upper face, but for the edges that are clamped.
CLAMPED = (mesh.vertices[:, 0] == 0) | (
    mesh.vertices[:, 0] == mesh.vertices[:, 0].max()
)
SEEN = (mesh.vertices[:, 2] == mesh.vertices[:, 2].max()) & ~CLAMPED
HELD_OUT = torch.arange(1, FRAMES + 1) % SETTINGS["held_out"] == 0


class PerCell(torch.nn.Module):
    """The six tetrahedra of a cell have one number."""

    def forward(self, x):
        return x.unsqueeze(-1).expand(-1, 6).reshape(-1)

    def right_inverse(self, x):
        return x.reshape(-1, 6)[:, 0]


def true_field():
    """Return the modulus of every cell, ``(100,)``: a stiff disc in a soft slab."""
    middle = mesh.vertices[mesh.tetrahedra].reshape(-1, 24, 3).mean(1)[:, :2]
    away = (middle - torch.tensor(SETTINGS["centre"])).norm(dim=1)
    inside = torch.sigmoid((SETTINGS["radius"] - away) * 4 / SETTINGS["width"])
    return SETTINGS["soft"] * (SETTINGS["stiff"] / SETTINGS["soft"]) ** inside


def make_slab(field):
    """Make the slab, clamped at two edges, and the logarithms of its moduli by cell."""
    moduli = torch.nn.Parameter(PerCell()(field))
    body = adjsim.NeoHookean(mesh, moduli, SETTINGS["ratio"])
    for step in (PerCell(), adjsim.Positive()):
        register_parametrization(body, "youngs_modulus", step)
    body.youngs_modulus = PerCell()(field)
    mass = mesh.lumped_mass(SETTINGS["density"])
    dynamics = adjsim.Mechanics(body, torch.where(CLAMPED, torch.inf, mass))
    (log_modulus,) = dynamics.parameters()
    return dynamics, log_modulus


def observe(dynamics):
    """Return where the surface is seen, ``(frames, throws, vertices, 3)``.

    Three blows give the slab a velocity across, along and out of its plane.
    """
    x, y = mesh.vertices[:, 0] / LENGTH, mesh.vertices[:, 1] / WIDTH
    wave = torch.sin(math.pi * x)
    tilted = wave * torch.cos(math.pi * y)
    none = torch.zeros_like(wave)
    blows = [[tilted, wave, none], [wave, tilted, none], [none, none, wave + tilted]]
    velocity = torch.stack([torch.stack(blow, -1) for blow in blows])
    state = dynamics.init(
        mesh.vertices.expand_as(velocity), velocity=SETTINGS["speed"] * velocity
    )
    motion = adjsim.simulate(
        dynamics,
        state,
        TIMES,
        solver=adjsim.VelocityVerlet(SETTINGS["dt"]),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
    ).position
    return motion[1:, :, SEEN]


def measure():
    """Return the noisy motion of the true slab."""
    with torch.no_grad():
        motion = observe(make_slab(true_field())[0])
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    noise = torch.randn(motion.shape, generator=generator, dtype=motion.dtype)
    return motion + SETTINGS["noise"] * noise


def misfits(motion, measured):
    """Return the mean squares of the residuals, in noise: fitted, held out."""
    squares = ((motion - measured) / SETTINGS["noise"]) ** 2
    return squares[~HELD_OUT].mean(), squares[HELD_OUT].mean()


def fit(dynamics, log_modulus, measured, strength):
    """Minimise half the squares of residuals and of steps of ln E between cells."""
    count = measured[~HELD_OUT].numel()
    grid = SETTINGS["cells"][:2]

    def loss(flat):
        with torch.no_grad():
            log_modulus.copy_(torch.from_numpy(flat))
        fitted, _ = misfits(observe(dynamics), measured)
        steps = [log_modulus.reshape(grid).diff(dim=axis) for axis in (0, 1)]
        rough = sum((step**2).sum() for step in steps)
        value = count / 2 * fitted + strength / 2 * rough
        (gradient,) = torch.autograd.grad(value, log_modulus)
        return value.item(), gradient.numpy()

    found = minimize(
        loss,
        log_modulus.detach().numpy().copy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": SETTINGS["iterations"], "maxcor": 30},
    )
    with torch.no_grad():
        log_modulus.copy_(torch.from_numpy(found.x))
        fitted, held_out = misfits(observe(dynamics), measured)
    return {
        "strength": strength,
        "fitted": fitted.item(),
        "held_out": held_out.item(),
        "runs": found.nfev,
        "field": log_modulus.detach().exp().tolist(),
    }


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    truth, measured = true_field(), measure()
    dynamics, log_modulus = make_slab(torch.full_like(truth, SETTINGS["start"]))
    fits = []
    # Each fit begins at the smoother one before.
    for strength in SETTINGS["strengths"]:
        fits.append(fit(dynamics, log_modulus, measured, strength))
        field = torch.tensor(fits[-1]["field"])
        correlation = torch.corrcoef(torch.stack([field, truth]))[0, 1]
        print(
            f"{strength:g}: {fits[-1]['runs']} runs, misfit "
            f"{fits[-1]['fitted']:.4f}, held out {fits[-1]['held_out']:.4f}, correl. "
            f"{correlation:.4f}, {field.min():.3g} to {field.max():.3g}",
            flush=True,
        )
        fits[-1]["field"] = [round(x, 1) for x in fits[-1]["field"]]
    study = {
        "made_by": "examples/data/make_modulus_field.py",
        "commit": commit,
        "settings": SETTINGS,
        "fits": fits,
    }
    with replacing(FILE) as temporary:
        temporary.write_text(json.dumps(study) + "\n")


if __name__ == "__main__":
    main()
