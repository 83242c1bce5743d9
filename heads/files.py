"""Files that are replaced whole: a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[str]:
    """A temporary name beside `path`; the file of that name is moved into place at the end, and
    removed where something fails.  Those that killed processes have left are removed first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    for left in path.parent.glob(".*"):
        number = left.suffix[1:]
        if left.stem == temporary.stem and number.isdecimal() and not _is_running(int(number)):
            left.unlink(missing_ok=True)
    try:
        yield str(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, write: Callable[..., Any]) -> None:
    """Calls `write` with a temporary name beside `path` and moves the result into place."""
    with replacing(path) as temporary:
        write(temporary)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def sha256(path: str | Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
