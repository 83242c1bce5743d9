"""The feature caches below a folder: what each was made from, and which one serves a run.

Each has a subfolder that is named by its fingerprint, so that unlike ones never touch one another.
Nothing is deleted here: a cache that no run needs any more is the user's to delete.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..inference.target import TargetModel
from .chunks import read_index
from .packing import Document, digest

FORMAT = 1


def fingerprint(
    target: TargetModel, documents: list[Document], taps: list[int], dtype: str
) -> dict[str, Any]:
    """Everything that the features depend on."""
    identity = target.spec.identity
    return {
        "format": FORMAT,
        "target": identity["fingerprint"],
        "target dtype": identity["dtype"],
        "adapter": identity.get("adapter"),
        "tokenizer": identity.get("tokenizer"),
        "taps": taps,
        "dtype": dtype,
        "documents": digest(documents),
    }


def serving(root: Path, wanted: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Folder and fingerprint of the complete cache that has what is wanted, with the fewest taps;
    of the one that is to be made where there is none."""
    text = json.dumps(wanted, sort_keys=True)
    own = root / f"cache-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    found = [
        (len(there["taps"]), folder != own, folder, there)
        for folder, index in _below(root).items()
        if index["complete"]
        and {**(there := index["fingerprint"]), "taps": wanted["taps"]} == wanted
        and {*wanted["taps"]} <= {*there["taps"]}
    ]
    *_, folder, there = min(found, key=lambda f: f[:3], default=(own, wanted))
    return folder, there


def others(root: Path, wanted: dict[str, Any]) -> str:
    """The caches below `root` that were made otherwise than is wanted, each in brackets."""
    found = []
    for folder, index in _below(root).items():
        differing = [k for k, v in wanted.items() if index["fingerprint"].get(k) != v]
        if differing:
            found.append(f" ({folder} was made with other {', '.join(differing)})")
    return "".join(found)


def _below(root: Path) -> dict[Path, dict[str, Any]]:
    """Folder and index of every cache, complete or not.  The first releases put one in `root`."""
    folders = [root, *sorted(root.glob("cache-*"))]
    found = {folder: read_index(folder) for folder in folders}
    return {folder: index for folder, index in found.items() if index is not None}
