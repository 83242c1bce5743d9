"""Adapters of peft on a target: merged into its weights, or their layers left in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..heads.errors import InputError

CONFIG = "adapter_config.json"


def check_adapter(adapter: str) -> None:
    """Before the model loads: is there an adapter, and of a kind that changes layers?

    Raises:
        InputError: no adapter there, or one of virtual tokens (prompt tuning, prefix tuning,
            P-tuning): those stand before every text, where no draft has a place for them.
    """
    from peft import PeftConfig

    path = Path(adapter).expanduser()
    if (path.exists() or adapter.startswith((".", "/", "~"))) and not (path / CONFIG).is_file():
        raise InputError(f"adapter {adapter!r}: there is no {path / CONFIG}", "Fix the path.")
    try:
        config = PeftConfig.from_pretrained(adapter)
    except Exception as error:  # whatever the hub's client meets, or a config of another release
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"adapter {adapter!r} cannot be loaded: {reason}", "Give a peft folder or hub id."
        ) from None
    if config.is_prompt_learning:
        raise _refusal(adapter, config)


def with_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """The model with an adapter merged into its weights or, where its kind has no merge, with the
    adapter's layers in place.

    Raises:
        InputError: an adapter of another model; or a kind that works outside of the layers, so
            that this model would not be the adapted one (gates by task or by token).
    """
    from peft import PeftModel

    try:
        wrapped: Any = PeftModel.from_pretrained(model, adapter).eval()
    except Exception as error:  # peft's own classes of errors are many
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"adapter {adapter!r} does not fit the target: {reason}",
            "Give one that was trained on this target.",
        ) from None
    refusal = _refusal(adapter, wrapped.active_peft_config)
    ids = torch.arange(8)[None] * 7 % model.config.vocab_size  # type: ignore[union-attr, operator]
    with torch.no_grad():
        try:
            wanted = wrapped(input_ids=ids).logits
        except (TypeError, ValueError, RuntimeError, AttributeError):
            raise refusal from None
        try:
            adapted = wrapped.merge_and_unload()
        except (AttributeError, NotImplementedError):
            adapted = wrapped.get_base_model()
        found = adapted(input_ids=ids).logits
    tolerance = (1e-3 if wanted.dtype == torch.float32 else 0.1) * float(wanted.abs().max())
    if found.shape != wanted.shape or float((found - wanted).abs().max()) > tolerance:
        raise refusal
    return adapted


def _refusal(adapter: str, config: Any) -> InputError:
    return InputError(
        f"adapter {adapter!r} is of kind {config.peft_type.value}, which works outside of the "
        "model's layers",
        "Use one that changes layers alone, such as LoRA, DoRA, IA3, OFT or VeRA.",
    )


def has_adapter_layers(model: nn.Module) -> bool:
    """Are there layers of an adapter that was not merged, which read the weights they wrap?"""
    return any(hasattr(module, "base_layer") for module in model.modules())
