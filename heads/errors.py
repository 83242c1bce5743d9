"""The error for whatever a user handed in: a config, a file, a checkpoint, an argument."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterable

FULL = errno.ENOSPC, errno.EDQUOT
PATIENCE = 10.0
"""Seconds in which the first process tells of an error that it meets too."""


class InputError(ValueError):
    """Bad input, in two lines: what was met, and what to do.  Scripts print it and exit with 2."""

    def __init__(self, met: str, advice: str) -> None:
        super().__init__(f"{met}\n{advice}")


def check_count(name: str, value: object) -> None:
    """Raises InputError unless `value` is an integer above 0, of which True is none."""
    if type(value) is not int or value < 1:
        raise InputError(f"{name} is {value!r}", "Give an integer, 1 or more.")


def check_switch(name: str, value: object) -> None:
    """Raises InputError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}", "Give True or False.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice that names the closest of `known`, and all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Available: {', '.join(known)}."


def _disk_is_full(error: Exception) -> bool:
    """Libraries that write in another language give the number as text."""
    number = getattr(error, "errno", None)
    return number in FULL or any(f"os error {n}" in str(error) for n in FULL)


def exit_code(main: Callable[[], int]) -> int:
    """Runs a command: bad input is printed, without a traceback, and gives 2, as does a file in the
    place of a folder or the reverse, or a full disk; Ctrl-C gives 130.

    What all processes of a run meet is printed once: the others leave it to the first for a while,
    at whose end the launcher ends them.
    """
    try:
        return main()
    except InputError as error:
        if int(os.environ.get("RANK", "0")):
            time.sleep(PATIENCE)
        print(error, file=sys.stderr)
        return 2
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        if error.filename is None:
            raise
        reason = f"{error.filename}: {error.strerror}"
        print(f"{reason}\nMake it readable and writable, or name another.", file=sys.stderr)
        return 2
    except Exception as error:
        if not _disk_is_full(error):
            raise
        print(f"the disk is full: {error}\nFree some space; what was saved stays.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
