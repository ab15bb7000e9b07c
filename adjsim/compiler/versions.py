"""The version of torch with which compiled loops are tested."""

import torch

TESTED = "2.13"


def untested_torch() -> str | None:
    """Return a warning if compiled loops are not tested with this version of torch.

    Compiled loops use private parts of torch. Return None for the tested version.
    """
    if torch.__version__.split(".")[:2] == TESTED.split("."):
        return None
    return (
        f"compile=True is tested with torch {TESTED} and not with {torch.__version__}; install "
        f"torch {TESTED} if it fails."
    )
