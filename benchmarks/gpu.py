"""Gradients of large systems and many replicas on a GPU, against jitted JAX, and peak memory by
horizon.

Float64, warm; medians of seven alternating runs of the whole gradient. JAX is timed on the device
that it finds, which is printed. It needs ``pip install -c constraints.txt -e ".[bench]"`` and a
CUDA build of torch, and for a fair ratio one of jax. Run: python benchmarks/gpu.py
"""

from __future__ import annotations

import statistics

import jax
import torch
from suite import ROUNDS, lennard_jones, ours

import adjsim

# Atoms, steps, replicas.
CASES: list[tuple[int, int, int | None]] = [(1000, 200, None), (10_000, 20, None), (13, 1000, 4096)]
HORIZONS = (1, 2, 4)


def main(device: str, cases: list[tuple[int, int, int | None]]) -> None:
    card = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(
        f"adjsim on {card}, JAX on {jax.devices()[0]}; microseconds a step, ratio to the better "
        "of JAX's two"
    )
    for atoms, steps, replicas in cases:
        sides = {
            "adjsim": ours(atoms, steps, replicas, "BAB", device=device),
            "adjsim, exact": ours(atoms, steps, replicas, "BAB", True, device=device),
            "adjsim, not compiled": ours(
                atoms, steps, replicas, "BAB", adjoint=adjsim.ReversibleAdjoint(), device=device
            ),
        }
        peers = lennard_jones(atoms, steps, replicas, 1.0).peers
        sides |= peers
        first = {name: side() for name, side in sides.items()}
        expected = first[next(iter(peers))].gradient
        assert all(abs(work.gradient / expected - 1) < 1e-6 for work in first.values())
        rounds = [{name: side().seconds for name, side in sides.items()} for _ in range(ROUNDS)]
        medians = {name: statistics.median(row[name] for row in rounds) for name in sides}
        best = min(medians[name] for name in peers)
        print(f"\n{atoms} atoms, {steps} steps" + (f", {replicas} replicas" if replicas else ""))
        for name, seconds in medians.items():
            print(f"  {name:24} {1e6 * seconds / steps:10.1f} {seconds / best:7.3f}", flush=True)
        if device == "cuda":
            for times in HORIZONS:
                run = ours(atoms, times * steps, replicas, "BAB", device=device)
                torch.cuda.reset_peak_memory_stats()
                run()
                print(
                    f"  peak memory at {times * steps} steps: "
                    f"{torch.cuda.max_memory_allocated() / 1e6:.0f} MB"
                )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this script measures a GPU.")
    main("cuda", CASES)
