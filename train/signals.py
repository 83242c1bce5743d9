"""Signals that end a run between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying; a second one of a kind kills as usual."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.getsignal(number)
            signal.signal(number, note)
    try:
        yield received
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
