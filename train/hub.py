"""Datasets of the hub, streamed once into a local file, which everything else reads.

A name is hub:OWNER/NAME, with :CONFIG and @SPLIT where they are wanted (the split is train unless
named).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..heads.errors import InputError
from .reading import whole_lines, without_nulls

NAME = re.compile(r"hub:(?P<path>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


def is_hub(name: str) -> bool:
    """Does `name` name a dataset of the hub, not a file?"""
    return name.startswith("hub:")


def shard(name: str, folder: Path, limit: int | None) -> Path:
    """The local file of the first `limit` rows (None: all) of a hub dataset."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name.removeprefix("hub:")).strip("-")
    rows = "" if limit is None else f"-{limit}"
    digest = hashlib.sha256(f"{name} {limit}".encode()).hexdigest()[:8]  # names may share a slug
    return folder / "hub" / f"{slug}{rows}-{digest}.jsonl"


def fetch(name: str, path: Path, limit: int | None) -> int:
    """Streams the rows of `name` to `path`, a line each, where it is not there yet; a second run
    goes on where one was ended.

    Returns:
        rows written now.
    Raises:
        InputError: no such dataset, no network, or rows that it cannot give.
    """
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.touch()
    done = whole_lines(part)
    count = 0
    with part.open("a", encoding="utf-8") as file:
        for row in tqdm(_stream(name, done, limit), desc=name, unit="row", initial=done):
            line = json.dumps(without_nulls(row), ensure_ascii=False, default=str)
            file.write(f"{line}\n")
            count += 1
    part.rename(path)
    return count


def _stream(name: str, done: int, limit: int | None) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    parts = NAME.fullmatch(name)
    if parts is None:
        raise InputError(f"{name!r} names no dataset", "Write hub:OWNER/NAME[:CONFIG][@SPLIT].")
    try:
        rows = load_dataset(
            parts["path"], parts["config"], split=parts["split"] or "train", streaming=True
        )
        yield from itertools.islice(rows.skip(done), None if limit is None else limit - done)
    except Exception as error:  # whatever the hub's client and its readers meet
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{name} cannot be read: {reason}",
            "Check the name and the network, or download its files and name one of them.",
        ) from None
