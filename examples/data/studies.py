"""Commit and numbers of the stored studies, for the scripts of this folder."""

import subprocess
from pathlib import Path

import numpy as np
import torch


def commit(script):
    """Return the commit of the working tree, in which adjsim and the script must not
    have changed.
    """

    def git(*words):
        return subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    paths = (":/adjsim", __file__, script)
    if git("status", "--porcelain", "--untracked-files=no", *paths):
        raise RuntimeError("adjsim or this script has changes; commit them first.")
    return git("rev-parse", "HEAD")


def rounded(x, digits):
    """Round all numbers, and write tensors and arrays as lists."""
    if isinstance(x, dict):
        return {key: rounded(value, digits) for key, value in x.items()}
    if isinstance(x, torch.Tensor | np.ndarray):
        return rounded(x.tolist(), digits)
    if isinstance(x, list | tuple):
        return [rounded(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x
