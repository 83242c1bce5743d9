"""The target's features, on disk or computed for each batch.

The states of all documents are computed once, in chunks whose composition depends on the documents
alone: taken from what was recorded while the target answered, computed where nothing was.  A chunk
that is missing or damaged is made again as a whole, so what a run reads does not depend on where
earlier ones were interrupted.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..heads import InputError
from ..heads.checkpoint import replace_file, sha256
from ..heads.protocols import Features
from ..inference.target import TargetModel
from .config import FeaturesConfig
from .data import Document, collate
from .recording import DTYPES, RecordedStates
from .tracking import is_main, say

INDEX, FORMAT = "index.json", 1
CHUNK_ROWS, CHUNK_TOKENS = 64, 8192
"""Bounds of a chunk: documents, and tokens once padded, so that a forward fits in memory."""


class FeatureSource(Protocol):
    """Where training gets the target's features from."""

    def get(self, documents: list[Document]) -> Features:
        """Features of `documents`, right padded with zeros, on the target's device and in its
        dtype, rounded to the cache's dtype on the way."""


class OnlineFeatures:
    """Features computed anew for each batch, through the same rounding as cached ones."""

    def __init__(self, target: TargetModel, taps: list[int], dtype: str) -> None:
        self.target, self.taps, self.dtype = target, taps, DTYPES[dtype]

    def get(self, documents: list[Document]) -> Features:
        """See `FeatureSource.get`."""
        rows = compute(self.target, documents, self.taps, self.dtype)
        return _pad(rows, self.target)


class FeatureCache:
    """Features of `documents`, which are told apart by `Document.row`, in a folder.

    chunk-*.safetensors hold the documents' tokens end to end (hidden [tokens, D], taps
    [tokens, K, D]); index.json holds the fingerprint, each finished chunk's sha256, and whether
    all are there.
    """

    def __init__(
        self,
        folder: Path,
        target: TargetModel,
        documents: list[Document],
        taps: list[int],
        config: FeaturesConfig,
        recorded: RecordedStates | None = None,
    ) -> None:
        self.folder, self.target, self.taps, self.config = folder, target, taps, config
        self.recorded = recorded
        self.chunks = make_chunks(documents)
        self.fingerprint = fingerprint(target, documents, taps, config.dtype)
        self.tokens = sum(len(d.ids) for d in documents)
        self._place: dict[int, tuple[int, int, int]] = {}
        for number, chunk in enumerate(self.chunks):
            start = 0
            for document in chunk:
                self._place[document.row] = number, start, start + len(document.ids)
                start += len(document.ids)
        assert len(self._place) == len(documents), "two documents of one row"
        self._open: dict[int, Any] = {}

    # -- filling ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the cache complete: the first process computes what is missing, the others watch
        the index, outside of any collective, however long it takes.

        Raises:
            InputError: the features would exceed `max_gb`.
        """
        self._check_size()
        if is_main():
            self._fill()
        else:
            while not self._finished():
                time.sleep(0.5)

    def bytes_needed(self) -> int:
        """Size of all features on disk."""
        states = self.tokens * (1 + len(self.taps))
        return states * self.target.spec.hidden_size * DTYPES[self.config.dtype].itemsize

    def _check_size(self) -> None:
        needed, cap = self.bytes_needed(), self.config.max_gb
        if needed > cap * 1e9:
            raise InputError(
                f"the target's features of {self.tokens} tokens need {needed} bytes "
                f"({needed / 1e9:.3g} GB), data.features.max_gb is {cap:g}",
                "Raise data.features.max_gb, train on fewer or shorter documents, use dtype: "
                "bfloat16 or fewer head.taps, or set data.features.cache=false.",
            )

    def _fill(self) -> None:
        done = self._usable()
        missing = [n for n in range(len(self.chunks)) if _name(n) not in done]
        if not missing:
            say(f"features: {self.tokens} tokens read from {self.folder}")
            self._write_index(done)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = tqdm(total=len(self.chunks), initial=len(done), desc="features", unit="chunk")
        for number in missing:
            path = self.folder / _name(number)
            tensors = self._compute_chunk(number)
            replace_file(path, lambda to, tensors=tensors: save_file(tensors, to))
            done[path.name] = sha256(path)
            self._write_index(done)
            progress.update()
        progress.close()
        if self.recorded is not None:
            self.recorded.remove()

    def _usable(self) -> dict[str, str]:
        """Checksums of the chunks that are whole; clears the folder of another fingerprint."""
        index = self._read_index()
        if index is None:
            return {}
        differing = [k for k, v in self.fingerprint.items() if index["fingerprint"].get(k) != v]
        if differing:
            say(f"features: {self.folder} was made with other {', '.join(differing)}; made anew")
            for path in self.folder.iterdir():
                if path.name == INDEX or re.fullmatch(r"chunk-\d+\.safetensors", path.name):
                    path.unlink()
            return {}
        whole = {n: s for n, s in index["chunks"].items() if _whole(self.folder / n, s)}
        if damaged := len(index["chunks"]) - len(whole):
            say(f"features: {damaged} damaged or missing chunk(s) in {self.folder} are made anew")
        return whole

    def _finished(self) -> bool:
        index = self._read_index()
        return (
            index is not None
            and index["fingerprint"] == self.fingerprint
            and index["complete"]
            and all(_whole(self.folder / n, s) for n, s in index["chunks"].items())
        )

    def _read_index(self) -> dict[str, Any] | None:
        try:
            index = json.loads((self.folder / INDEX).read_text())
            return index if {"fingerprint", "chunks", "complete"} <= index.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _write_index(self, done: dict[str, str]) -> None:
        complete = len(done) == len(self.chunks)
        index = {"fingerprint": self.fingerprint, "complete": complete, "chunks": done}
        replace_file(self.folder / INDEX, lambda to: Path(to).write_text(json.dumps(index)))

    def _compute_chunk(self, number: int) -> dict[str, Tensor]:
        dtype = DTYPES[self.config.dtype]
        chunk = self.chunks[number]
        known: dict[int, Features] = {}
        if self.recorded is not None:
            found = {d.row: self.recorded.get(d.ids) for d in chunk}
            known = {row: states for row, states in found.items() if states is not None}
        missing = [document for document in chunk if document.row not in known]
        if missing:
            computed = compute(self.target, missing, self.taps, dtype)
            known |= {d.row: states for d, states in zip(missing, computed, strict=True)}
        rows = [known[document.row] for document in chunk]
        return {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}

    # -- reading ---------------------------------------------------------------------------------

    def get(self, documents: list[Document]) -> Features:
        """See `FeatureSource.get`; only the rows asked for are read from disk."""
        return _pad([self._read(document) for document in documents], self.target)

    def _read(self, document: Document) -> Features:
        number, start, stop = self._place[document.row]
        if number not in self._open:
            self._open[number] = safe_open(self.folder / _name(number), framework="pt")
        file = self._open[number]
        return {name: file.get_slice(name)[start:stop] for name in file.keys()}  # noqa: SIM118


def open_features(
    config: FeaturesConfig,
    folder: Path,
    target: TargetModel,
    documents: list[Document],
    taps: list[int],
    recorded: RecordedStates | None = None,
) -> FeatureSource:
    """The source that the config asks for, ready to read.

    Raises:
        InputError: see `FeatureCache.prepare`.
    """
    if not config.cache:
        return OnlineFeatures(target, taps, config.dtype)
    cache = FeatureCache(folder, target, documents, taps, config, recorded)
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


def compute(
    target: TargetModel, documents: list[Document], taps: list[int], dtype: torch.dtype
) -> list[Features]:
    """Features of each document in `dtype`, from one forward: hidden [T, D], taps [T, K, D]."""
    batch = collate(documents)
    device = target.spec.device
    found = target.features(batch["ids"].to(device), batch["length"].to(device), taps)
    lengths = batch["length"].tolist()
    return [
        {name: tensor[row, :length].to(dtype) for name, tensor in found.items()}
        for row, length in enumerate(lengths)
    ]


def _pad(rows: list[Features], target: TargetModel) -> Features:
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True).to(
            target.spec.device, target.spec.dtype
        )
        for name in rows[0]
    }


def fingerprint(
    target: TargetModel, documents: list[Document], taps: list[int], dtype: str
) -> dict[str, Any]:
    """Everything that the features depend on."""
    identity = target.spec.identity
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.array([document.row, len(document.ids), *document.ids]).tobytes())
        digest.update(bytes(document.loss_mask))
    return {
        "format": FORMAT,
        "target": identity["fingerprint"],
        "target dtype": identity["dtype"],
        "adapter": identity.get("adapter"),
        "tokenizer": identity.get("tokenizer"),
        "taps": taps,
        "dtype": dtype,
        "documents": digest.hexdigest(),
    }


def _name(number: int) -> str:
    return f"chunk-{number:05d}.safetensors"


def _whole(path: Path, checksum: str) -> bool:
    try:
        return sha256(path) == checksum
    except OSError:
        return False
