"""The torch that compiled loops are tested with."""

import torch

TESTED = "2.13"


def untested_torch() -> str | None:
    """Say that compiled loops, which use private parts of torch, are not tested with this one; None
    where they are.
    """
    if torch.__version__.split(".")[:2] == TESTED.split("."):
        return None
    return (
        f"compile=True is tested with torch {TESTED} and not with {torch.__version__}; install "
        f"torch {TESTED} if it fails."
    )
