"""A folder of files that are computed once: which of them are whole, and one process that makes the
rest.

chunk-*.safetensors, and index.json with what they were made from, each finished chunk's sha256, and
whether all are there.  A chunk that is missing or damaged is made again as a whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ..heads.checkpoint import replace_file, sha256
from .locks import InUse, locked
from .ranks import is_main, say

INDEX = "index.json"


class Chunks:
    """`count` chunks of `what` in `folder`, made from what `fingerprint` says."""

    def __init__(self, folder: Path, fingerprint: dict[str, Any], count: int, what: str) -> None:
        self.folder, self.fingerprint, self.count, self.what = folder, fingerprint, count, what

    def path(self, number: int) -> Path:
        """The file of a chunk."""
        return self.folder / f"chunk-{number:05d}.safetensors"

    def finished(self) -> bool:
        """Are all there, and whole?"""
        known = self._known()
        return len(known) == self.count and all(self._is_whole(*one) for one in known.items())

    def whole(self) -> dict[str, str]:
        """Checksums of the chunks that are there, and whole."""
        return {name: of for name, of in self._known().items() if self._is_whole(name, of)}

    def fill(self, compute: Callable[[int], dict[str, Tensor]]) -> None:
        """Makes them complete: one process computes what is missing, those that were launched with
        it watch the index, outside of any collective, however long it takes."""
        if is_main():
            self._fill(compute)
        else:
            while not self.finished():
                time.sleep(0.5)

    def _fill(self, compute: Callable[[int], dict[str, Tensor]]) -> None:
        """Complete chunks are written by nobody, so those who read them need no lock."""
        waiting = False
        while True:
            try:
                with locked(self.folder / INDEX, "Set data.features.folder.", file=True):
                    return self._compute(compute)
            except InUse:
                if not waiting:
                    say(f"{self.what}: another process fills {self.folder}; waiting for it")
                waiting = True
                time.sleep(0.5)

    def _compute(self, compute: Callable[[int], dict[str, Tensor]]) -> None:
        done = self.whole()
        if damaged := len(self._known()) - len(done):
            say(
                f"{self.what}: {damaged} damaged or missing chunk(s) in {self.folder} are made anew"
            )
        missing = [n for n in range(self.count) if self.path(n).name not in done]
        self._write_index(done)
        progress = tqdm(total=self.count, initial=len(done), desc=self.what, unit="chunk")
        for number in missing:
            path, tensors = self.path(number), compute(number)
            replace_file(path, lambda to, tensors=tensors: save_file(tensors, to))
            done[path.name] = sha256(path)
            self._write_index(done)
            progress.update()
        progress.close()

    def _known(self) -> dict[str, str]:
        """Checksums by name, as the index has them."""
        index = read_index(self.folder)
        if index is None or index["fingerprint"] != self.fingerprint:
            return {}
        return dict(index["chunks"])

    def _is_whole(self, name: str, checksum: str) -> bool:
        try:
            return sha256(self.folder / name) == checksum
        except OSError:
            return False

    def _write_index(self, done: dict[str, str]) -> None:
        # One that was complete stays so while it is repaired, so that all processes choose it.
        before = read_index(self.folder) or {"fingerprint": None}
        known = before["fingerprint"] == self.fingerprint and before["complete"]
        complete = known or len(done) == self.count
        index = {"fingerprint": self.fingerprint, "complete": complete, "chunks": done}
        replace_file(self.folder / INDEX, lambda to: Path(to).write_text(json.dumps(index)))


def read_index(folder: Path) -> dict[str, Any] | None:
    """index.json of a folder: `fingerprint`, `chunks` (checksums by name), `complete`.  None where
    there is none, or no whole one."""
    try:
        index = json.loads((folder / INDEX).read_text())
        dicts = all(isinstance(index[name], dict) for name in ("fingerprint", "chunks"))
        return index if dicts and "complete" in index else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
