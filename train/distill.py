"""The target's features on disk.

The states of all documents are computed once, in chunks whose composition depends on the documents
alone: taken from what was recorded while the target answered, computed where nothing was.  So what
a run reads does not depend on where earlier ones were interrupted.  Features are kept by document,
however batches are packed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..heads import InputError
from ..heads.objectives import normalisers, objective
from ..heads.protocols import Features
from ..inference.embeddings import REFILL, TargetEnds
from ..inference.target import TargetModel
from . import caches
from .chunks import Chunks, read_index
from .config import TrainConfig
from .data import Documents
from .features import FeatureSource, OnlineFeatures, compute
from .packing import Document
from .ranks import is_main, say
from .recording import RecordedStates
from .rounding import bytes_a_state, decode
from .sections import FeaturesConfig

CHUNK_ROWS, CHUNK_TOKENS = 64, 8192
"""Bounds of a chunk: documents, and tokens once padded, so that a forward fits in memory."""


class FeatureCache(FeatureSource):
    """Features of `documents`, which are told apart by `Document.row`, on disk.

    The chunks of its own folder below `root` (see caches.py, chunks.py) hold the documents' tokens
    end to end: hidden [tokens, D], taps [tokens, K, D], as `rounding.encode` gives them.  Those of
    log_z/ below it hold log_z [tokens], once a run has asked for it.  A complete cache of more taps
    serves fewer.
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
        self.states = Chunks(self.folder, self.fingerprint, len(self.chunks), "features")
        self.normalisers: Chunks | None = None
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
        self._open: dict[Path, Any] = {}
        self._reader = ThreadPoolExecutor(1, "features")  # alone opens files once all are there
        self._expected: tuple[list[Document], Future[Features]] | None = None

    # -- filling ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the cache complete: one process computes what is missing, others wait for it.

        Raises:
            InputError: the features would exceed `max_gb`, or some are missing and the target is
                not there to compute them.
        """
        if self.states.finished():
            say(f"features: {self.tokens} tokens read from {self.folder}")
            return
        self._check_size()
        if isinstance(self.target, TargetEnds):
            raise InputError(f"data.features.cache_only is set, but {self._lack()}", REFILL)
        if others := caches.others(self.root, self.fingerprint):
            say(f"features: other caches stay, delete what no run needs:{others}")
        self.states.fill(self._compute_chunk)
        if self.recorded is not None and is_main():
            self.recorded.remove()

    def prepare_normalisers(self) -> None:
        """Has `get` give `log_z` too: computed once, from the states as they read back.  Costs the
        whole lm_head at every taught position, which acceptances would else pay at every visit."""
        folder, made_from = self.folder / "log_z", {"of": self.folder.name}
        self.normalisers = Chunks(folder, made_from, len(self.chunks), "normalisers")
        if not self.normalisers.finished():
            self.normalisers.fill(self._compute_normalisers)

    def bytes_needed(self) -> int:
        """Size of all features on disk."""
        states = self.tokens * (1 + len(self.taps))
        return states * bytes_a_state(self.target.spec.hidden_size, self.config.dtype)

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
        if read_index(self.folder) is None:
            return f"{self.root} holds no features{caches.others(self.root, self.fingerprint)}"
        whole = len(self.states.whole())
        return f"{self.folder} has only {whole} of {len(self.chunks)} chunks whole"

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
        return {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}

    def _compute_normalisers(self, number: int) -> dict[str, Tensor]:
        spec, chunk = self.target.spec, self.chunks[number]
        states = [
            decode(self._slices(self.states, document, "hidden"), spec.dtype) for document in chunk
        ]
        hidden = torch.cat([row["hidden"] for row in states]).to(spec.device)
        taught = [(*document.loss_mask[1:], False) for document in chunk]
        rows = torch.tensor(list(chain.from_iterable(taught)), device=spec.device).nonzero()[:, 0]
        return {"log_z": normalisers(hidden, rows, spec.projector(None, False)).cpu()}

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
        found = self._read_states(document)
        if self.normalisers is not None:
            found |= self._slices(self.normalisers, document)
        return found

    def _read_states(self, document: Document) -> Features:
        found = self._slices(self.states, document)
        if len(self.columns) < len(self.taps):
            taps = {k: v[:, self.columns] for k, v in found.items() if k.startswith("taps")}
            found = {k: v for k, v in found.items() if not k.startswith("taps")}
            found |= taps if self.columns else {}
        return found

    def _slices(self, chunks: Chunks, document: Document, part: str = "") -> Features:
        """What begins with `part`.  Only the rows asked for are read from disk."""
        number, start, stop = self._place[document.row]
        path = chunks.path(number)
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        file = self._open[path]
        names = [name for name in file.keys() if name.startswith(part)]  # noqa: SIM118
        return {name: file.get_slice(name)[start:stop] for name in names}


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
    recorded = RecordedStates(config, target, taps)
    cache = FeatureCache(config.features_folder, target, rows, taps, features, recorded, pack)
    cache.prepare()
    head = config.head
    if head.has_draft_vocab and objective(head.loss).is_acceptance:
        cache.prepare_normalisers()
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
