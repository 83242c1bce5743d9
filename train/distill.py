"""The target's features on disk.

The states of all documents are computed once, in chunks whose composition depends on the documents
alone: taken from what was recorded while the target answered, computed where nothing was.  A chunk
that is missing or damaged is made again as a whole, so what a run reads does not depend on where
earlier ones were interrupted.  Features are kept by document, however batches are packed.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ..heads import InputError
from ..heads.checkpoint import replace_file, sha256
from ..heads.objectives import normalisers
from ..heads.protocols import Features
from ..inference.embeddings import REFILL, TargetEnds
from ..inference.target import TargetModel
from . import caches
from .caches import INDEX, chunk_name, is_whole, read_index
from .config import TrainConfig
from .data import Documents
from .features import FeatureSource, OnlineFeatures, compute
from .locks import InUse, locked
from .packing import Document
from .recording import RecordedStates
from .rounding import bytes_a_state, decode
from .sections import FeaturesConfig
from .tracking import is_main, say

CHUNK_ROWS, CHUNK_TOKENS = 64, 8192
"""Bounds of a chunk: documents, and tokens once padded, so that a forward fits in memory."""


class FeatureCache(FeatureSource):
    """Features of `documents`, which are told apart by `Document.row`, on disk.

    In the cache's own folder below `root` (see caches.py) chunk-*.safetensors hold the documents'
    tokens end to end (hidden [tokens, D], taps [tokens, K, D], as `rounding.encode` gives them, and
    log_z [tokens] of the hidden states as they read back, which spares acceptances the lm_head);
    index.json holds the fingerprint, each finished chunk's sha256, and whether all are there.  A
    complete cache of more taps serves fewer.
    """

    def __init__(
        self,
        root: Path,
        target: TargetModel,
        documents: list[Document],
        taps: list[int],
        config: FeaturesConfig,
        recorded: RecordedStates | None = None,
        pack: int | None = None,
    ) -> None:
        super().__init__(target, pack)
        self.root, self.config, self.recorded = root, config, recorded
        self.chunks = make_chunks(documents)
        wanted = caches.fingerprint(target, documents, taps, config.dtype)
        self.folder, self.fingerprint = caches.serving(root, wanted)
        self.taps: list[int] = self.fingerprint["taps"]
        self.columns = [self.taps.index(tap) for tap in taps]
        self.tokens = sum(len(d.ids) for d in documents)
        self._place: dict[int, tuple[int, int, int]] = {}
        for number, chunk in enumerate(self.chunks):
            start = 0
            for document in chunk:
                self._place[document.row] = number, start, start + len(document.ids)
                start += len(document.ids)
        assert len(self._place) == len(documents), "two documents of one row"
        self._open: dict[int, Any] = {}
        self._reader = ThreadPoolExecutor(1, "features")  # the only one that opens files
        self._expected: tuple[list[Document], Future[Features]] | None = None

    # -- filling ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the cache complete: the first process computes what is missing, the others watch
        the index, outside of any collective, however long it takes.

        Raises:
            InputError: the features would exceed `max_gb`, or some are missing and the target is
                not there to compute them.
        """
        if self._finished():
            say(f"features: {self.tokens} tokens read from {self.folder}")
            return
        self._check_size()
        if isinstance(self.target, TargetEnds):
            raise InputError(f"data.features.cache_only is set, but {self._lack()}", REFILL)
        if is_main():
            self._fill()
        else:
            while not self._finished():
                time.sleep(0.5)

    def bytes_needed(self) -> int:
        """Size of all features on disk."""
        state = bytes_a_state(self.target.spec.hidden_size, self.config.dtype)
        return self.tokens * ((1 + len(self.taps)) * state + torch.float32.itemsize)

    def _check_size(self) -> None:
        needed, cap = self.bytes_needed(), self.config.max_gb
        if needed > cap * 1e9:
            raise InputError(
                f"the target's features of {self.tokens} tokens need {needed} bytes "
                f"({needed / 1e9:.3g} GB), data.features.max_gb is {cap:g}",
                "Raise data.features.max_gb, train on fewer or shorter documents, use dtype: "
                "bfloat16 or int8 or fewer head.taps, or set data.features.cache=false.",
            )

    def _lack(self) -> str:
        """Why this cache is not complete, for an error."""
        index = read_index(self.folder)
        if index is None:
            return f"{self.root} holds no features{caches.others(self.root, self.fingerprint)}"
        whole = sum(is_whole(self.folder / n, s) for n, s in index["chunks"].items())
        return f"{self.folder} has only {whole} of {len(self.chunks)} chunks whole"

    def _fill(self) -> None:
        """A complete cache is written by nobody, so those who read it need no lock."""
        if others := caches.others(self.root, self.fingerprint):
            say(f"features: other caches stay, delete what no run needs:{others}")
        waiting = False
        while True:
            try:
                with locked(self.folder / INDEX, "Set data.features.folder.", file=True):
                    return self._compute()
            except InUse:
                if not waiting:
                    say(f"features: another process fills {self.folder}; waiting for it")
                waiting = True
                time.sleep(0.5)

    def _compute(self) -> None:
        done = self._usable()
        missing = [n for n in range(len(self.chunks)) if chunk_name(n) not in done]
        self._write_index(done)
        progress = tqdm(total=len(self.chunks), initial=len(done), desc="features", unit="chunk")
        for number in missing:
            path = self.folder / chunk_name(number)
            tensors = self._compute_chunk(number)
            replace_file(path, lambda to, tensors=tensors: save_file(tensors, to))
            done[path.name] = sha256(path)
            self._write_index(done)
            progress.update()
        progress.close()
        if self.recorded is not None:
            self.recorded.remove()

    def _usable(self) -> dict[str, str]:
        """Checksums of the chunks that are whole."""
        index = read_index(self.folder)
        if index is None or index["fingerprint"] != self.fingerprint:
            return {}
        whole = {n: s for n, s in index["chunks"].items() if is_whole(self.folder / n, s)}
        if damaged := len(index["chunks"]) - len(whole):
            say(f"features: {damaged} damaged or missing chunk(s) in {self.folder} are made anew")
        return whole

    def _finished(self) -> bool:
        index = read_index(self.folder)
        return (
            index is not None
            and index["fingerprint"] == self.fingerprint
            and len(index["chunks"]) == len(self.chunks)
            and all(is_whole(self.folder / n, s) for n, s in index["chunks"].items())
        )

    def _write_index(self, done: dict[str, str]) -> None:
        # One that was complete stays so while it is repaired, so that all processes choose it.
        before = read_index(self.folder) or {"fingerprint": None}
        known = before["fingerprint"] == self.fingerprint and before["complete"]
        complete = known or len(done) == len(self.chunks)
        index = {"fingerprint": self.fingerprint, "complete": complete, "chunks": done}
        replace_file(self.folder / INDEX, lambda to: Path(to).write_text(json.dumps(index)))

    def _compute_chunk(self, number: int) -> dict[str, Tensor]:
        chunk, recorded = self.chunks[number], self.recorded
        known: dict[int, Features] = {}
        if recorded is not None and recorded.taps == self.taps:
            found = {d.row: recorded.get(d.ids) for d in chunk}
            known = {row: states for row, states in found.items() if states is not None}
        missing = [document for document in chunk if document.row not in known]
        if missing:
            computed = compute(self.target, missing, self.taps, self.config.dtype)
            known |= {d.row: states for d, states in zip(missing, computed, strict=True)}
        rows = [known[document.row] for document in chunk]
        states = {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}
        return states | {"log_z": self._log_z(states, chunk)}

    def _log_z(self, states: Features, chunk: list[Document]) -> Tensor:
        """[tokens] see `Features`."""
        spec = self.target.spec
        hidden = decode({k: v for k, v in states.items() if k.startswith("hidden")}, spec.dtype)
        taught = [(*document.loss_mask[1:], False) for document in chunk]
        rows = torch.tensor(list(chain.from_iterable(taught))).nonzero()[:, 0]
        whole = hidden["hidden"].to(spec.device)
        return normalisers(whole, rows.to(spec.device), spec.projector(None, False)).cpu()

    # -- reading ---------------------------------------------------------------------------------

    def expect(self, documents: list[Document]) -> None:
        """See `FeatureSource.expect`."""
        self._expected = documents, self._reader.submit(super()._laid, documents)

    def _laid(self, documents: list[Document]) -> Features:
        if self._expected is None or self._expected[0] != documents:
            return self._reader.submit(super()._laid, documents).result()
        (_, found), self._expected = self._expected, None
        return found.result()

    def _stored(self, documents: list[Document]) -> list[Features]:
        return [self._read(document) for document in documents]

    def _read(self, document: Document) -> Features:
        """Only the rows asked for are read from disk."""
        number, start, stop = self._place[document.row]
        if number not in self._open:
            self._open[number] = safe_open(self.folder / chunk_name(number), framework="pt")
        file = self._open[number]
        found = {name: file.get_slice(name)[start:stop] for name in file.keys()}  # noqa: SIM118
        if len(self.columns) < len(self.taps):
            taps = {k: v[:, self.columns] for k, v in found.items() if k.startswith("taps")}
            found = {k: v for k, v in found.items() if not k.startswith("taps")}
            found |= taps if self.columns else {}
        return found


def open_features(
    config: TrainConfig, target: TargetModel, documents: Documents, taps: list[int]
) -> FeatureSource:
    """The source that the config asks for, ready to read.

    Raises:
        InputError: see `FeatureCache.prepare`.
    """
    features, pack = config.data.features, config.data.pack_length
    if not features.cache:
        return OnlineFeatures(target, taps, features.dtype, pack)
    rows = documents.train + documents.held_out + documents.unused
    recorded = RecordedStates(config, target)
    cache = FeatureCache(config.features_folder, target, rows, taps, features, recorded, pack)
    cache.prepare()
    return cache


def make_chunks(documents: list[Document]) -> list[list[Document]]:
    """Documents by length, in chunks of at most CHUNK_ROWS and CHUNK_TOKENS once padded."""
    chunks: list[list[Document]] = []
    for document in sorted(documents, key=lambda d: (len(d.ids), d.row)):
        rows = len(chunks[-1]) + 1 if chunks else 0
        if not 0 < rows <= CHUNK_ROWS or rows * len(document.ids) > CHUNK_TOKENS:
            chunks.append([])
        chunks[-1].append(document)
    return chunks
