"""Draw images/inside.png, the packages and one run through them: ``python docs/draw_inside.py``."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# The layers from the top, each with its packages and what they hold.
LAYERS = [
    [("cli", "commands, tables")],
    [("estimators", "gradients of means, fits, chaos")],
    [("simulation", "simulate(), checks of the start")],
    [("adjoints", "runs, sweeps, loops, saves")],
    [("solvers", "steps")],
    [("dynamics", "terms, moves, lattice")],
    [("observables", "what is measured"), ("io", "ASE, OpenMM, pictures")],
    [("potentials", "energies and forces")],
    [("ivp", "solve_ivp"), ("compiler", "loops as C++"), ("meshes", "bodies")],
    [("core", "states, readings, boxes, noise, files")],
]
# Steps of a run: the text, the layer it is in, and whether it is of the backward pass.
STEPS = [
    ("1 simulate() checks its arguments", 2, False),
    ("2 a Reading copies the dynamics", 9, False),
    ("3 Solver.plan makes a StepPlan of moves", 4, False),
    ("4 prepare() makes Stepper and Inputs", 3, False),
    ("5 a driver runs the steps", 3, False),
    ("6 moves evaluate forces", 5, False),
    ("7 Recorder, History keep what is needed", 3, False),
    ("8 Rewind gives earlier states", 3, True),
    ("9 Move.backward adds to Cotangents", 5, True),
    ("10 one autograd call reaches the user's tensors", 9, True),
]


def draw(path: Path) -> None:
    """Draw the picture."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    height, width = 0.8, 5.6
    for row, layer in enumerate(LAYERS):
        y, each = len(LAYERS) - row, width / len(layer)
        for k, (name, text) in enumerate(layer):
            axes.add_patch(
                FancyBboxPatch(
                    (k * each, y), each - 0.12, height, boxstyle="round,pad=0.02",
                    facecolor="#eef3f8", edgecolor="#5b7c99",
                )
            )  # fmt: skip
            middle = k * each + each / 2 - 0.06
            axes.text(middle, y + 0.52, name, ha="center", va="center", weight="bold")
            axes.text(middle, y + 0.22, text, ha="center", va="center", fontsize=8)
    for k, (text, layer, backward) in enumerate(STEPS):
        y, color = len(LAYERS) + 0.4 - k, "#b0452c" if backward else "#2c5d8f"
        axes.text(7.3, y, text, va="center", color=color)
        end = (width - 0.05, len(LAYERS) - layer + height / 2)
        axes.add_patch(
            FancyArrowPatch(
                (7.25, y), end, arrowstyle="-|>", mutation_scale=10, color=color, lw=0.8
            )
        )
    axes.text(7.3, len(LAYERS) + 1.3, "forward", color="#2c5d8f", weight="bold")
    axes.text(8.6, len(LAYERS) + 1.3, "backward", color="#b0452c", weight="bold")
    axes.text(0, len(LAYERS) + 1.3, "packages: each imports those below", weight="bold")
    axes.set_xlim(-0.1, 12)
    axes.set_ylim(0.8, len(LAYERS) + 1.7)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "inside.png")
