"""Checkpoints of a run: output_dir/checkpoints/step-N, written whole or not at all.

A folder holds the head's weights, the optimizer's state, the random number generators of every
process, and state.json: step, global batch, stream of rows, best tau, tracker id, head and target.
The data position is step x global batch and the learning rate a function of the step, so neither is
stored twice.  complete.json, with the sha256 of each file, is written last.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..heads import InputError
from ..heads.checkpoint import DESCRIPTION, read_description, sha256, without_removed
from .config import TrainConfig
from .ranks import warn

WEIGHTS, OPTIMIZER, RANDOM, STATE = "model.safetensors", "optimizer.pt", "random.pt", "state.json"
COMPLETE, FOLDER = "complete.json", "checkpoints"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk; `state` is its state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]

    def lies_in(self, output_dir: str | Path) -> bool:
        """Is it one of the run in `output_dir`?"""
        return self.folder.resolve().parent == (Path(output_dir) / FOLDER).resolve()

    def weights(self) -> dict[str, Tensor]:
        """The head's state dict."""
        return load_file(self.folder / WEIGHTS)

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict."""
        return torch.load(self.folder / OPTIMIZER, weights_only=True, map_location="cpu")

    def random_states(self) -> list[dict[str, Any]]:
        """Of each process, see `random_state`."""
        return torch.load(self.folder / RANDOM, weights_only=True, map_location="cpu")


def save(
    output_dir: str | Path,
    weights: dict[str, Tensor],
    optimizer: dict[str, Any],
    random_states: list[dict[str, Any]],
    state: dict[str, Any],
) -> Path:
    """Writes checkpoints/step-N, N = state["step"], replacing one of that name.

    Returns:
        its folder.
    """
    folder = Path(output_dir) / FOLDER / f"step-{state['step']}"
    for left_by_a_kill in folder.parent.glob(".step-*"):
        shutil.rmtree(left_by_a_kill)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    # Clones: tensors that share storage cannot be written.
    tensors = {name: t.detach().cpu().clone() for name, t in weights.items()}
    save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
    torch.save(optimizer, temporary / OPTIMIZER)
    torch.save(random_states, temporary / RANDOM)
    (temporary / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=2))
    sums = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
    (temporary / COMPLETE).write_text(json.dumps(sums, indent=2))
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
    _sync(folder.parent)
    return folder


def _sync(path: Path) -> None:
    """Puts a file or folder on the disk itself, so that it outlives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(folder: str | Path) -> Checkpoint:
    """The checkpoint in `folder`, its files compared with their checksums.

    Raises:
        InputError: missing, not whole, or of another format.
    """
    folder = Path(folder)
    advice = "Give a folder like OUTPUT_DIR/checkpoints/step-100, or resume=latest."
    if not folder.is_dir():
        raise InputError(f"there is no checkpoint {folder}", advice)
    try:
        sums = json.loads((folder / COMPLETE).read_text())
        broken = [name for name in sums if sha256(folder / name) != sums[name]]
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"the checkpoint {folder} is not whole: {error}", advice) from None
    if broken or {WEIGHTS, OPTIMIZER, RANDOM, STATE} - sums.keys():
        raise InputError(f"the checkpoint {folder} is damaged: {', '.join(broken)}", advice)
    if state["format"] != FORMAT:
        raise InputError(
            f"{folder} has format version {state['format']!r}, this release reads {FORMAT}",
            "Resume with the release that wrote it.",
        )
    return Checkpoint(folder, state)


def numbered(output_dir: str | Path) -> list[tuple[int, Path]]:
    """(N, folder) of every checkpoints/step-N, highest first; other names are not ours."""
    found = (Path(output_dir) / FOLDER).glob("step-*")
    matches = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in found if path.is_dir()]
    return sorted(((int(m[1]), path) for m, path in matches if m), reverse=True)


def latest(output_dir: str | Path) -> Checkpoint | None:
    """The highest whole checkpoint; broken ones above it are skipped with a warning."""
    for _, folder in numbered(output_dir):
        try:
            return load(folder)
        except InputError as error:
            warn(f"skipped: {str(error).splitlines()[0]}")
    return None


def prune(output_dir: str | Path, keep_last: int) -> None:
    """Deletes all but the `keep_last` highest whole checkpoints, never the highest of them nor the
    one that the best head (in output_dir itself) was saved at; -1 keeps all.  Folders with other
    names, and broken ones, are left alone."""
    newest = None if keep_last < 0 else latest(output_dir)
    if newest is None:
        return
    output = Path(output_dir)
    best = read_description(output).get("step") if (output / DESCRIPTION).is_file() else None
    found = [(n, folder) for n, folder in numbered(output) if (folder / COMPLETE).is_file()]
    for number, folder in found[max(1, keep_last) :]:
        if folder != newest.folder and number != best:
            # Without this file it is no checkpoint any more, whenever the deletion is cut short.
            (folder / COMPLETE).unlink()
            shutil.rmtree(folder)


def find_resume(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint that `resume` asks for; None to start afresh.

    Raises:
        InputError: output_dir holds a run that would be overwritten or is another one, or the
            checkpoint is missing or broken.
    """
    output, head = Path(config.output_dir), None
    if (output / DESCRIPTION).is_file():
        head = read_description(output)
    if config.resume == "none":
        if head or numbered(output):
            raise InputError(
                f"output_dir {output} already holds a run",
                "Pass resume=latest to go on with it, or another output_dir.",
            )
        return None
    found = latest(output) if config.resume == "latest" else load(config.resume)
    if found is None and (broken := [folder.name for _, folder in numbered(output)]):
        raise InputError(
            f"no checkpoint of {output} is whole: {', '.join(broken)}",
            "Restore one, or move them away to start from step 0.",
        )
    if found is not None:
        if not found.lies_in(output) and (head or numbered(output)):
            on = "Pass resume=latest to go on with the one that is there"
            raise InputError(
                f"output_dir {output} already holds a run, and resume names a checkpoint of "
                f"another, {found.folder}",
                f"{on if numbered(output) else 'Move its head away'}, or give another output_dir.",
            )
        _check_head(found.state["head"], config, found.folder)
        if config.resume != "latest":
            _check_newest(found, output)
    elif head is not None:
        _check_head(head, config, output)
    return found


def _check_head(saved: dict[str, Any], config: TrainConfig, where: Path) -> None:
    # Fields that are younger than the checkpoint have their defaults.
    defaults = {
        key: f.get_default(call_default_factory=True)
        for key, f in type(config.head).model_fields.items()
    }
    met = {"kind": config.head.kind, **config.head.model_dump()}
    trained = defaults | {"kind": saved["kind"], **without_removed(saved["config"])}
    for key in met | trained:
        if met.get(key) != trained.get(key):
            raise InputError(
                f"{where} has a head with {key} {trained.get(key)!r}, "
                f"the config asks for {met.get(key)!r}",
                "Correct head in the config, or train into another output_dir.",
            )


def _check_newest(found: Checkpoint, output: Path) -> None:
    """Later checkpoints would win over those of the resumed run at the next resume=latest."""
    for step, folder in numbered(output):
        if step > found.step and (folder / COMPLETE).is_file():
            raise InputError(
                f"{folder} is later than {found.folder}, which is to be resumed",
                "Move the later one away, or train into another output_dir.",
            )


def random_state() -> dict[str, Any]:
    """State of this process's generators (torch, CUDA, numpy, python), fit for weights_only."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Undoes `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
