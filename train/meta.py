"""FILE.meta.json: the target and the settings that a prepared file was made with, and whether all
that was asked for is in it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..heads.checkpoint import check_target, replace_file
from ..heads.errors import InputError
from ..inference.target import TargetModel
from .reading import read_rows, whole_lines

MEANING = {"prompts": " (checksums of what data.prompts and data.limit select)"}
"""What an error says of settings that do not explain themselves."""


def meta_path(path: Path) -> Path:
    """Where it lies: beside the prepared file."""
    return path.with_name(f"{path.name}.meta.json")


@dataclass(frozen=True)
class Meta:
    """What a file was made with.

    Attributes:
        settings: JSON values.
        complete: is all in it that was asked for?
    """

    settings: dict[str, Any]
    complete: bool


def write_meta(path: Path, target: TargetModel, settings: dict[str, Any], complete: bool) -> None:
    """Writes what `path` is made with, see `Meta`."""
    meta = {"target": target.spec.identity, "settings": settings, "complete": complete}
    text = json.dumps(meta, indent=2) + "\n"
    replace_file(meta_path(path), lambda to: Path(to).write_text(text, encoding="utf-8"))


def read_meta(path: Path, target: TargetModel) -> Meta | None:
    """What `path` was made with; None where it is the user's own file.

    Raises:
        InputError: it was made with another target, or cannot be read.
    """
    where = meta_path(path)
    if not where.exists():
        return None
    try:
        meta = json.loads(where.read_text(encoding="utf-8"))
        made_with, settings = dict(meta["target"]), dict(meta["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} is damaged: {error}", f"Remove it and {path.name}.") from None
    check_target(made_with, target.spec.identity, path)
    return Meta(settings, bool(meta.get("complete", True)))  # the first releases did not say


def take_up(
    path: Path, target: TargetModel, settings: dict[str, Any], elsewhere: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Makes `path` ready to be appended to, and gives the rows that it has, by number.  A line torn
    by a kill is removed.

    Raises:
        InputError: see `check_settings` and `read_meta`.
    """
    begun = path.exists() and path.stat().st_size
    found = read_meta(path, target) if begun else None
    if begun:
        check_settings(path, found, settings, elsewhere)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Is more asked for than it has?
    if found is None or any(found.settings.get(key) != settings[key] for key in settings):
        write_meta(path, target, settings, complete=False)
    return read_rows(path, Counter()) if begun and whole_lines(path) else iter(())


def check_settings(
    path: Path, made_with: Meta | None, wanted: dict[str, Any], elsewhere: str
) -> None:
    """Is `path` what `wanted` would make?  Entries may have been added at the end of `answers`.

    Args:
        elsewhere: what the user may do but remove the file.
    Raises:
        InputError: naming the setting that differs.
    """
    advice = f"Remove {path} to begin anew, or {elsewhere}."
    if made_with is None:
        raise InputError(f"{path} exists and was not made by this command", advice)
    known = made_with.settings
    if "answers" in wanted:
        entries = len(known.get("answers") or [])
        wanted = wanted | {"answers": wanted["answers"][:entries]}
    for name, value in wanted.items():
        if known.get(name) != value:
            values = f"{known.get(name)}, now {value}{MEANING.get(name, '')}"
            raise InputError(f"{path} was made with other {name}: {values}", advice)
