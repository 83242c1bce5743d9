"""From what a user names to a target and a drafter."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from ..heads.checkpoint import DESCRIPTION, WEIGHTS, load_head, read_description
from ..heads.errors import InputError, check_switch, nearest
from ..heads.protocols import Drafter
from . import packed, rounded
from .draft_model import DraftModel
from .drafters import Merged, Plain
from .ngram import NGram
from .target import TargetModel

DRAFTERS = ("heads+ngram", "heads", "ngram", "none")
TARGET_NAMES = ("model", "gguf_file", "revision", "adapter", "random", "seed")
PARTS = ("name", "taps", "max_depth", "start", "propose", "advance")  # of a Drafter


def local_folder(heads: str) -> Path:
    """The folder of a head; a hub id is downloaded.

    Raises:
        InputError: neither a head's folder nor a hub id.
    """
    path = Path(heads)
    if path.exists() or heads.count("/") != 1 or heads.startswith((".", "/", "~")):
        read_description(path)
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(heads, allow_patterns=[DESCRIPTION, WEIGHTS]))
    except Exception as error:  # whatever the hub client meets
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{heads} is no folder with {DESCRIPTION}, and the hub does not give it: {reason}",
            "Give the output_dir of a finished training run, or a hub id.",
        ) from None


def check_names(heads: object, target: object, tokenizer: object, named: dict[str, Any]) -> None:
    """Refuses names that say nothing, or too much, before anything loads.

    Args:
        named: of a target to load, `TargetModel.load`'s arguments.
    Raises:
        InputError: neither heads nor a target, things of another type, an unknown argument, or a
            tokenizer or arguments that a target which is there already has no use for.
    """
    if heads is None and target is None:
        raise InputError("neither heads nor a target is given", "Give a heads folder.")
    for name, value, kinds in (
        ("heads", heads, (str, Path)),
        ("target", target, (str, Path, nn.Module, TargetModel)),
    ):
        if not isinstance(value, (*kinds, type(None))):
            raise InputError(f"{name} is a {type(value).__name__}", "Give a name or folder.")
    loaded = isinstance(target, nn.Module | TargetModel)
    known = [name for name in inspect.signature(TargetModel.load).parameters if name != "model"]
    for name in named:
        if name not in known:
            raise InputError(f"from_pretrained does not take {name!r}", nearest(name, known))
    if named and loaded:
        raise InputError(f"{sorted(named)} with a loaded model", "They name a model to load.")
    if tokenizer is not None and not isinstance(target, nn.Module):
        raise InputError(
            "a tokenizer without a loaded model",
            "A target that is named has its own; a TargetModel takes one when it is made.",
        )


def check_drafter(asked: object, heads: object, widen: bool) -> None:
    """Refuses a drafter before anything loads.

    Raises:
        InputError: an unknown name, what is no drafter, heads without a folder, or `widen` without
            heads.
    """
    check_switch("widen", widen)
    by_default = asked is None and heads is not None
    if widen and not by_default and asked not in ("heads", "heads+ngram"):
        raise InputError(
            f"widen is asked for, and drafter {_called(asked)} has no heads",
            "Leave widen out, or give heads; a head that is handed over has .widen.",
        )
    if not isinstance(asked, str):
        if asked is not None and not isinstance(asked, nn.Module | Path):
            missing = [part for part in PARTS if not hasattr(asked, part)]
            if missing:
                raise InputError(
                    f"drafter is a {type(asked).__name__} without {', '.join(missing)}",
                    f"Give one of {', '.join(DRAFTERS)}, a draft model or its name, or a Drafter.",
                )
        return
    if asked in DRAFTERS:
        if heads is None and asked.startswith("heads"):
            raise InputError(f"drafter {asked!r} needs a heads folder", "Give it first.")
    elif "/" not in asked and not Path(asked).exists():
        raise InputError(
            f"drafter {asked!r} is unknown",
            nearest(asked, DRAFTERS) + " A draft model is named by hub id, folder or package://.",
        )


def _called(drafter: object) -> str:
    return repr(drafter if isinstance(drafter, str) else type(drafter).__name__)


def build_target(
    target: str | Path | nn.Module | TargetModel | None,
    folder: Path | None,
    tokenizer: Any,
    named: dict[str, Any],
) -> TargetModel:
    """The target that is given, or that the head in `folder` names."""
    if isinstance(target, TargetModel):
        return target
    if isinstance(target, nn.Module):
        return TargetModel(target, tokenizer)
    if target is not None:
        return TargetModel.load(str(target), **named)
    assert folder is not None
    identity = read_description(folder)["target"]
    trained = {name: identity.get(name) for name in TARGET_NAMES}
    if trained["random"] is None:
        trained.pop("seed")
    if trained["model"] is None and trained["random"] is None:
        raise InputError(f"{folder} does not name its target", "Pass target=.")
    return TargetModel.load(**(trained | named))


def build_drafter(
    asked: str | Path | nn.Module | Drafter | None,
    target: TargetModel,
    folder: Path | None,
    *,
    allow_other_target: bool = False,
    widen: bool = False,
) -> Drafter:
    """The drafter that is asked for: by default heads and n-grams in one tree where there are
    heads, else none.

    Args:
        asked: one of `DRAFTERS`, a draft model or its name, or any `Drafter`.
        widen: let the head draft over the ids of each row's own text too.
    Raises:
        InputError: an unknown name, heads without a folder, or nothing to widen.
    """
    if asked is None:
        asked = "none" if folder is None else "heads+ngram"
    if isinstance(asked, nn.Module) and not hasattr(asked, "propose"):
        return DraftModel(TargetModel(asked), target)
    asked = str(asked) if isinstance(asked, Path) else asked
    check_drafter(asked, folder, widen)
    if not isinstance(asked, str):
        return asked  # type: ignore[return-value]
    if asked == "none":
        return Plain()
    if asked == "ngram":
        return NGram()
    if folder is None or asked not in DRAFTERS:
        return DraftModel(TargetModel.load(asked, device=str(target.device)), target)
    head = load_head(folder, target.spec, allow_other_target=allow_other_target)
    if widen and not head.can_widen:
        raise InputError(
            f"widen is asked for, and {folder} drafts over all ids or has an lm_head of its own",
            "Leave widen out, or train with a draft_vocab and the target's lm_head.",
        )
    head.widen = widen
    if target.packed:
        packed.pack_linears(head, rounded.product)
        head.packed = True
    return head if asked == "heads" else Merged([NGram(), head])
