"""Runs a command that kills itself: `victim.py PLACE NUMBER SECONDS SCRIPT ARGS`.

The run says what it does in audit events of Python: opening and renaming files, and each step.
SECONDS after the NUMBER-th event of PLACE the process gets SIGKILL.  NUMBER 0 kills nothing; the
last line printed counts the events of every place.
"""

import json
import os
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from proof.places import PLACES

ROOT = Path(__file__).parents[2]


class Executioner:
    """Counts events and, at the right one, starts the clock."""

    def __init__(self, place: str, number: int, seconds: float) -> None:
        self.place, self.number, self.seconds = place, number, seconds
        self.seen = dict.fromkeys(PLACES, 0)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "selfdraft.step"):
            return
        for name, place in PLACES.items():
            if re.search(place.pattern, f"{event} {arguments}"):
                self.seen[name] += 1
                if (name, self.seen[name]) == (self.place, self.number):
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
    place, number, seconds, script, *rest = sys.argv[1:]
    executioner = Executioner(place, int(number), float(seconds))
    announce_steps()
    sys.addaudithook(executioner)
    sys.argv = [script, *rest]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        print(json.dumps(executioner.seen))
