"""States that the target had anyway while it answered, kept so that no second pass is needed.

They are addressed by the token ids that they belong to, so states of an interrupted run are found
again or never asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..heads import HEADS
from ..heads.checkpoint import replace_file
from ..heads.protocols import Features
from ..inference.target import TargetModel
from .config import TrainConfig
from .rounding import encode


class Recorder:
    """Collects the states of rows while they are decoded: `Speculator.generate(record=...)`."""

    def __init__(self, taps: list[int], dtype: str) -> None:
        """Args:
        dtype: what states are rounded to, of rounding.py.
        """
        self.taps, self.dtype = taps, dtype
        self._parts: dict[int, list[Features]] = {}

    @property
    def filled(self) -> bool:
        """Are there states of any row?"""
        return bool(self._parts)

    def add(self, row: int, features: Features) -> None:
        """Takes the states [M, ..] of the next M tokens that row `row` has read."""
        stored = encode(features, self.dtype)
        kept = {name: value.cpu().clone() for name, value in stored.items()}
        self._parts.setdefault(row, []).append(kept)

    def states(self, row: int, tokens: int) -> Features:
        """Stored states [tokens, ..] of a row of `tokens` tokens.  The last one, which the target
        never reads and training never looks at, is zero."""
        parts = self._parts[row]
        joined = {name: torch.cat([part[name] for part in parts])[:tokens] for name in parts[0]}
        missing = tokens - len(joined["hidden"])
        assert missing <= 1, "states of a row are missing"
        return {
            name: torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
            for name, value in joined.items()
        }


def layers_read(configs: Sequence[TrainConfig], target: TargetModel) -> list[int]:
    """Layers that any of their heads reads, ascending."""
    layers = target.spec.num_layers
    return sorted({t for c in configs for t in HEADS[c.head.kind].layers_tapped(c.head, layers)})


class RecordedStates:
    """A folder of recorded states, for one target, set of taps and dtype; others are not seen."""

    def __init__(
        self, config: TrainConfig, target: TargetModel, taps: list[int] | None = None
    ) -> None:
        """Args:
        taps: None for those that the config's head reads.
        """
        self.folder = config.features_folder / "recorded"
        self.taps = layers_read([config], target) if taps is None else taps
        self.dtype = config.data.features.dtype
        identity = target.spec.identity
        made_with = [identity["fingerprint"], identity["dtype"], self.taps, self.dtype]
        self.made_with = hashlib.sha256(str(made_with).encode()).hexdigest()[:16]
        self._files: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Size of what lies there, of whatever target, taps and dtype."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def write(self, rows: list[tuple[list[int], Features]]) -> int:
        """Adds states of rows of ids, in a file of their own.  Returns the bytes written."""
        tensors: dict[str, Tensor] = {}
        for ids, features in rows:
            tensors |= {f"{_key(ids)}.{name}": value for name, value in features.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.made_with}-{_key(rows[0][0])}.safetensors"
        replace_file(path, lambda to: save_file(tensors, to))
        return path.stat().st_size

    def get(self, ids: list[int]) -> Features | None:
        """The stored states of these ids, where they were recorded."""
        if self._files is None:
            self._files = self._index()
        key = _key(ids)
        if key not in self._files:
            return None
        file = self._files[key]
        names = [name for name in file.keys() if name.startswith(key)]  # noqa: SIM118
        return {name.removeprefix(f"{key}."): file.get_tensor(name) for name in names}

    def _index(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in sorted(self.folder.glob(f"{self.made_with}-*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError):  # damaged: these rows are computed instead
                continue
            found |= {name.split(".")[0]: file for name in file.keys()}  # noqa: SIM118
        return found

    def remove(self) -> None:
        """Deletes the files, once a complete cache holds their content."""
        self._files = None
        for path in self.folder.glob(f"{self.made_with}-*.safetensors"):
            path.unlink()


def _key(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()[:24]
