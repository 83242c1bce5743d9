"""The two ends of a target, its embedding and its lm_head, in a folder of their own, with what a
new head may start from: all that the training of heads from cached features needs, however large
the target is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..heads.checkpoint import replace_file, sha256
from ..heads.errors import InputError
from ..heads.spec import TargetWeights
from .loading import resolve_device, tokenizer_fingerprint
from .projection import Projection
from .target import TargetModel

WEIGHTS, NOTES = "ends.safetensors", "target.json"
START, NORM = "start.", "norm_scale"  # names of what heads may start from
REFILL = "Run scripts/prepare_data.py with this config, which loads the whole target."


class _Ends(nn.Module):
    def __init__(self, config: Any, embedding: Any, lm_head: Any) -> None:
        super().__init__()
        self.config, self.embedding, self.lm_head = config, embedding, lm_head

    def tensors(self) -> dict[str, Tensor]:
        """By name; the weight of a tied lm_head is the embedding's and not named again."""
        return dict(self.named_parameters()) | dict(self.named_buffers())


def save_ends(target: TargetModel, folder: Path) -> None:
    """Writes the ends, tokenizer, config and identity of `target`.

    Raises:
        InputError: an lm_head without a dense weight.
    """
    weights = target.weights
    weights.lm_head(None)
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = target.model
    tensors = _Ends(model.config, target.embedding, target.lm_head).tensors()
    tensors |= {START + name: tensor for name, tensor in weights.last_layer.items()}
    if weights.norm_scale is not None:
        tensors[START + NORM] = weights.norm_scale
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    replace_file(folder / WEIGHTS, lambda to: save_file(tensors, to))
    model.config.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    notes = {
        "identity": target.spec.identity,
        "eos_ids": sorted(target.eos_ids),
        "sha256": sha256(folder / WEIGHTS),
    }
    # The file that says that the others are whole comes last.
    replace_file(folder / NOTES, lambda to: Path(to).write_text(json.dumps(notes, indent=2)))


class TargetEnds(TargetModel):
    """A target that embeds and projects, but has no layers between: it cannot decode, and its
    features are those of a complete cache."""

    def __init__(
        self, ends: Any, tokenizer: Any, notes: dict[str, Any], start: dict[str, Tensor]
    ) -> None:
        self.model, self.tokenizer = ends, tokenizer
        self.embedding, self.lm_head = ends.embedding, ends.lm_head
        self.config = ends.config.get_text_config()
        self.device, self.dtype = ends.lm_head.weight.device, ends.lm_head.weight.dtype
        self.eos_ids, self.packed = set(notes["eos_ids"]), 0
        self._projection = Projection(self.lm_head, self.config)
        norm, rows = start.pop(NORM, None), self._projection.start_rows
        self.weights = TargetWeights(rows, norm, start)
        self.spec = self._spec(notes["identity"])

    @classmethod
    def read(cls, folder: Path, *, device: str = "auto", **named: Any) -> TargetEnds:
        """What `save_ends` has written.

        Args:
            named: how the config names the target; must be how it was named there.
        Raises:
            InputError: nothing there, damaged files, or another target.
        """
        notes = _read_notes(folder)
        for name, value in named.items():
            if notes["identity"].get(name) != value:
                raise InputError(
                    f"{folder} holds the ends of a target with {name} "
                    f"{notes['identity'].get(name)!r}, the config has {value!r}",
                    REFILL,
                )
        tokenizer = None
        if notes["identity"]["tokenizer"] is not None:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            if tokenizer_fingerprint(tokenizer) != notes["identity"]["tokenizer"]:
                raise InputError(f"the tokenizer in {folder} is another one", REFILL)
        place = resolve_device(device)
        tensors = load_file(folder / WEIGHTS)
        names = [name for name in tensors if name.startswith(START)]
        start = {name.removeprefix(START): tensors.pop(name).to(place) for name in names}
        ends = _build(folder, tensors).requires_grad_(False)
        return cls(ends.to(place), tokenizer, notes, start)

    def _run(self, taps: list[int], **inputs: Any) -> NoReturn:
        raise InputError(
            "this target has only its embedding and lm_head loaded, it cannot read tokens",
            "Set data.features.cache_only=false to load it whole.",
        )


def _read_notes(folder: Path) -> dict[str, Any]:
    try:
        notes = json.loads((folder / NOTES).read_text())
        if sha256(folder / WEIGHTS) == notes["sha256"]:
            return notes
        reason = f"{WEIGHTS} is damaged"
    except FileNotFoundError:
        reason = "they were not written, or not to the end"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    raise InputError(
        f"data.features.cache_only is set, but {folder} does not hold the target's embedding and "
        f"lm_head: {reason}",
        REFILL,
    )


def _build(folder: Path, tensors: dict[str, Tensor]) -> _Ends:
    """The target's own modules, whose classes its config names, filled with `tensors`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        ends = _Ends(model.config, model.get_input_embeddings(), model.get_output_embeddings())
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = ends.get_submodule(".".join(path))
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    if ends.lm_head.weight.is_meta:  # tied
        ends.lm_head.weight = ends.embedding.weight
    return ends
