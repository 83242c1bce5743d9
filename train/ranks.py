"""What one process says for all of a run."""

from __future__ import annotations

import os
import warnings

from tqdm.auto import tqdm


def is_main() -> bool:
    """Is this the first process?  Works before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """One line on the terminal, from the first process alone, beside any progress bar."""
    if is_main():
        tqdm.write(message)


def warn(message: str) -> None:
    """A warning in the caller's caller, from the first process alone."""
    if is_main():
        warnings.warn(message, stacklevel=3)
