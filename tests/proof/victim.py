"""Runs a command that kills itself: `victim.py PATTERN NUMBER SECONDS SCRIPT ARGS`.

The run says what it does in audit events of Python: opening and renaming files, and each step.
SECONDS after the NUMBER-th event that PATTERN is found in, the process gets SIGKILL.  NUMBER 0
kills nothing and prints how many such events there were.
"""

import os
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Executioner:
    """Counts events and, at the right one, starts the clock."""

    def __init__(self, pattern: str, number: int, seconds: float) -> None:
        self.pattern, self.number, self.seconds = re.compile(pattern), number, seconds
        self.seen = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "selfdraft.step"):
            return
        if self.pattern.search(f"{event} {arguments}"):
            self.seen += 1
            if self.seen == self.number:
                threading.Timer(self.seconds, self.kill).start()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def announce_steps() -> None:
    """Each optimizer step becomes an event."""
    from selfdraft.train.step import Stepper

    real = Stepper.__call__

    def step(self: Stepper, *args: Any) -> bool:
        sys.audit("selfdraft.step", args[1])
        return real(self, *args)

    Stepper.__call__ = step  # type: ignore[method-assign]


if __name__ == "__main__":
    pattern, number, seconds, script, *rest = sys.argv[1:]
    executioner = Executioner(pattern, int(number), float(seconds))
    announce_steps()
    sys.addaudithook(executioner)
    sys.argv = [script, *rest]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        print(f"events: {executioner.seen}")
