"""A head's folder: model.safetensors beside head.json, which says everything needed to load it.

Both files are replaced whole.  head.json holds the other's checksum, so that a pair torn by a crash
is noticed, and a checksum of its own kind, config and wiring, so that an edit is.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .base import HEADS, Head, build_head
from .errors import InputError, nearest
from .files import replace_file as replace_file
from .files import replacing
from .files import sha256 as sha256
from .shapes import first_rates
from .spec import TargetSpec

FORMAT = 1
REMOVED = {"reach": 0.0, "on_policy": 0.0}
"""Fields that trainings had once, at the value that changed nothing."""
WEIGHTS, DESCRIPTION = "model.safetensors", "head.json"
SIZES = ("model_type", "hidden_size", "num_layers", "vocab_size")


def save_head(
    folder: str | Path,
    head: Head,
    weights: dict[str, torch.Tensor] | None = None,
    **notes: Any,
) -> None:
    """Writes `head` to `folder`; the target's tensors are not part of it.

    Args:
        weights: the head's state dict, where `head` itself holds shards of it.
        notes: further JSON values for head.json, such as the trained length.
    Raises:
        InputError: a head that has lost tensors, as packing for decoding does to it.
    """
    if head.packed and weights is None:
        raise InputError(
            f"the {head.kind} head was packed for decoding and has no weights to save",
            "Copy the folder that it came from.",
        )
    weights = head.state_dict() if weights is None else weights
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Clones: tensors that share storage cannot be written.
    tensors = {name: t.detach().cpu().clone() for name, t in weights.items()}
    description = {
        "format": FORMAT,
        "kind": head.kind,
        "config": head.config.model_dump(),
        "target": head.spec.identity,
        "wiring": {
            "norm_stage": getattr(head.config, "norm_stage", "post"),
            "taps": head.taps,
            "draft_vocab": None if head.draft_ids is None else len(head.draft_ids),
        },
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }
    description["config_sha256"] = _config_sum(description)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
        description |= {"sha256": sha256(temporary), **notes}
        # Before the old weights are gone: what JSON cannot hold leaves the old pair whole.
        text = (json.dumps(description, indent=2, ensure_ascii=False) + "\n").encode()
    replace_file(folder / DESCRIPTION, lambda path: Path(path).write_bytes(text))


def read_description(folder: str | Path) -> dict[str, Any]:
    """head.json of a head's folder.

    Raises:
        InputError: no head there, not JSON, or another format version.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise InputError(
            f"{folder} holds no {DESCRIPTION}",
            "Give the output_dir of a finished training run (accelerate launch train.py CONFIG).",
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version = description["format"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}", "Train again or restore it.") from None
    if version != FORMAT:
        raise InputError(
            f"{path} has format version {version!r}, this release reads {FORMAT}",
            "Load it with the release that wrote it, or train again.",
        )
    for key, kind in {"kind": str, "config": dict, "target": dict, "sha256": str}.items():
        if not isinstance(description.get(key), kind):
            raise InputError(f"{path} lacks {key!r}", "Train again or restore it.")
    return description


def load_head(folder: str | Path, spec: TargetSpec, *, allow_other_target: bool = False) -> Head:
    """The head in `folder`, on the target it was trained for, in eval mode.

    Args:
        allow_other_target: accept a target with other weights but equal sizes; drafts get worse,
            the output law stays the target's.
    Raises:
        InputError: damaged or foreign files, or another target, naming the field that differs.
    """
    folder = Path(folder)
    description = read_description(folder)
    check_target(
        description["target"],
        spec.identity,
        folder,
        allow_other=allow_other_target,
        advice=", or pass allow_other_target=True",
    )
    kind = description["kind"]
    if kind not in HEADS:
        raise InputError(f"{folder}: unknown head kind {kind!r}", nearest(kind, HEADS))
    try:
        known = {k: v for k, v in description["config"].items() if k not in REMOVED}
        config = HEADS[kind].Config.model_validate(known)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InputError(f"{folder}/{DESCRIPTION}: {problems}", "Restore the file.") from None
    tensors = _read_weights(folder / WEIGHTS, description["sha256"])
    advice = f"Restore {folder}/{DESCRIPTION}."
    head = build_head(config, spec, tensors.get("draft_ids"), advice)
    _check_tensors(head, tensors, folder)
    # Folders of the first releases have no such sum.
    if description.get("config_sha256", now := _config_sum(description)) != now:
        raise InputError(
            f"{folder}/{DESCRIPTION}: kind, config or wiring were changed after the head was saved",
            "Restore the file: they say what its tensors were trained as.",
        )
    head.load_state_dict(tensors)
    head.trained_length = description.get("trained_length")
    head.sharpness = _by_depth(description, "sharpness", config.depth, folder, _is_factor)
    accepted = _by_depth(description, "tau_t1_by_depth", config.depth, folder, _is_share)
    head.rates = first_rates(accepted or ())
    return head.requires_grad_(False).eval().to(spec.device, spec.dtype)


def _config_sum(description: dict[str, Any]) -> str:
    """Checksum of what a head was trained as, much of which no shape shows."""
    known = [description.get(key) for key in ("kind", "config", "wiring")]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def without_removed(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of a run's head without those that no longer exist and that it made no use of."""
    return {k: v for k, v in config.items() if k not in REMOVED or v != REMOVED[k]}


def _by_depth(
    description: dict[str, Any], name: str, depth: int, folder: Path, fits: Callable[[Any], bool]
) -> list[Any] | None:
    """A field with a value for each depth, or null."""
    found = description.get(name)
    if found is None or (isinstance(found, list) and len(found) == depth and all(map(fits, found))):
        return found
    raise InputError(
        f"{folder}/{DESCRIPTION}: {name} is {found!r}",
        f"Give {depth} numbers, one a depth, or null.",
    )


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_share(value: Any) -> bool:
    """None where a depth had no rows."""
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)


def check_target(
    trained: dict[str, Any],
    met: dict[str, Any],
    where: Any,
    *,
    allow_other: bool = False,
    advice: str = "",
) -> None:
    """Compares the identity of the target in hand with the one a head or a cache was made with.

    Args:
        allow_other: other weights or another tokenizer only warn.
        advice: what else than loading the named target can be done about those.

    Raises:
        InputError: naming the first field that differs, with both values.
    """
    for key in SIZES:
        if trained.get(key) != met.get(key):
            raise InputError(
                f"{where} was made for a target with {key} {trained.get(key)!r}, "
                f"this one has {met.get(key)!r}",
                f"Load {_named(trained)}.",
            )
    # Weights of another dtype are compared after rounding both to bfloat16.
    same_dtype = trained.get("dtype") == met.get("dtype")
    weights = "fingerprint" if same_dtype else "fingerprint_bf16"
    if trained.get(weights) is None and not allow_other:
        raise InputError(
            f"{where} does not say which weights its target had: {weights} is missing",
            f"Restore the file{advice}.",
        )
    # Without a tokenizer on one side there is nothing to compare.
    known = [k for k in (weights, "tokenizer") if None not in (trained.get(k), met.get(k))]
    differing = [k for k in known if trained[k] != met[k]]
    if differing and not allow_other:
        what = "another tokenizer" if differing == ["tokenizer"] else "other weights"
        if trained.get("adapter_fingerprint") != met.get("adapter_fingerprint"):
            names = [identity.get("adapter") for identity in (trained, met)]
            what = f"{_adapter(names[0])} there, {_adapter(names[1])} here"
            if names[0] == names[1]:
                what = f"{_adapter(names[0])} has other weights than it had then"
        raise InputError(
            f"{where} was made for another target than {_named(met)}: {what} "
            f"({differing[0]} {trained[differing[0]]} there, {met[differing[0]]} here)",
            f"Load {_named(trained)}{advice}.",
        )
    if differing:
        warnings.warn(f"{where} was made for a target with another {differing[0]}", stacklevel=2)
    elif not same_dtype:
        warnings.warn(
            f"{where} was made with a {trained.get('dtype')} target; this one is "
            f"{met.get('dtype')}, the head is cast",
            stacklevel=2,
        )


def _named(identity: dict[str, Any]) -> str:
    """How an error names a target."""
    if identity.get("random"):
        return f"the random target of seed {identity.get('seed')}"
    adapter = identity.get("adapter")
    added = f" with {_adapter(adapter)}" if adapter else ""
    return f"the target {identity.get('model')!r}{added}"


def _adapter(name: str | None) -> str:
    return f"adapter {name!r}" if name else "no adapter"


def _read_weights(path: Path, checksum: str) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InputError(f"{path} is missing", "Restore it beside head.json or train again.")
    if sha256(path) != checksum:
        raise InputError(
            f"{path} is damaged: its checksum is not the one in {DESCRIPTION}",
            "Restore the file or train again; `resume: latest` goes on from a whole checkpoint.",
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file: {error}", "Train again.") from None


def _check_tensors(head: Head, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    faults = [f"missing {n}" for n in sorted(wanted.keys() - found.keys())]
    faults += [f"unexpected {n}" for n in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{n} has shape {found[n]}, wanted {wanted[n]}"
        for n in sorted(wanted.keys() & found.keys())
        if wanted[n] != found[n]
    ]
    if faults:
        raise InputError(
            f"{folder}: the tensors do not fit {DESCRIPTION}: {'; '.join(faults[:4])}",
            f"{len(faults)} in all; restore the pair of files that was saved together.",
        )
