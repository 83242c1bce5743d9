"""Files that are replaced whole: a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STALE = 3600.0
"""Seconds without a write after which a temporary file is nobody's."""


@contextmanager
def replacing(path: Path) -> Iterator[str]:
    """A temporary name beside `path`; the file of that name is moved into place at the end, and
    removed where something fails.  Those that killed processes have left are removed first: no
    process, on whatever machine, has written to one for `STALE` seconds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    for left in path.parent.glob(".*"):
        with suppress(OSError):  # another process may remove it, or it is another user's
            ours = left.stem == temporary.stem and left.suffix[1:].isdecimal()
            if ours and time.time() - left.stat().st_mtime > STALE:
                left.unlink()
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


def sha256(path: str | Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
