"""Folders and files that one run at a time writes to."""

from __future__ import annotations

import fcntl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..heads.errors import InputError


class InUse(InputError):
    """Another process holds the lock."""


@contextmanager
def locked(kept: Path, advice: str, *, file: bool = False) -> Iterator[int]:
    """Keeps a folder to this process, or a file whose folder others may use.  The operating system
    lets go of what a killed process held, and the lock file stays: it says nothing by itself.

    Args:
        advice: what there is to do but wait.
    Yields:
        the lock's descriptor; a child that inherits it holds the lock too.
    Raises:
        InUse: another process holds it.
        InputError: there can be no such folder.
    """
    lock = kept.with_name(f".{kept.name}.lock") if file else kept / ".lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise InputError(
            f"{lock.parent} is no folder that can be written to: {error.strerror}", advice
        ) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"{kept} is in use by another process", f"Wait for it to end, or: {advice}"
            ) from None
        except OSError as error:  # a disk without locks, as some shared ones are
            reason = f"{kept} lies on a disk that takes no locks ({error.strerror})"
            warnings.warn(f"{reason}: see to it that one run alone writes there", stacklevel=3)
        yield handle.fileno()
