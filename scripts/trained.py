"""What a training came to, read from its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from selfdraft.heads.checkpoint import WEIGHTS, read_description
from selfdraft.heads.errors import InputError
from selfdraft.scripts.experiments import Variant
from selfdraft.train import checkpoint
from selfdraft.train.evaluate import TAUS
from selfdraft.train.tracking import METRICS


def figures(variant: Variant) -> dict[str, Any]:
    """Sizes, times and held-out tau of a variant that is trained.

    Raises:
        InputError: its training diverged.
    """
    folder, found = variant.folder, checkpoint.latest(variant.folder)
    assert found is not None, "not trained"
    lines = _metrics(folder)
    tokens, seconds = sum(line.get("tokens", 0) for line in lines), found.state["seconds"]
    best = read_description(folder)
    if lost := [name for name in TAUS if best.get(name) is None]:
        reason = f"{variant.name} has no finite {lost[0]}: its training diverged"
        raise InputError(reason, "Lower optim.lr, or leave it out.")
    return {
        "name": variant.name,
        "kind": best["kind"],
        "parameters": parameters(folder),
        "steps": found.step,
        "minutes": seconds / 60,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "best_step": best["step"],
        **{name: best[name] for name in TAUS},
    }


Steps = list[tuple[list[int], float]]
"""The rows of each step, and the head's tau on them before it learned from them."""


def steps(variant: Variant) -> Steps:
    """See `Steps`."""
    return [(line["rows"], line["tau"]) for line in _metrics(variant.folder) if "rows" in line]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).open()]


def parameters(folder: Path) -> int:
    """Learned numbers of the head in `folder`."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    learned = [s for name, s in slices.items() if name != "draft_ids"]
    return sum(math.prod(s.get_shape()) for s in learned)
