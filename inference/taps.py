"""Tapped hidden states: hooks that are there during one forward only.

Shape suffixes: B rows, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..heads.errors import InputError


@contextmanager
def tapped(layers: nn.ModuleList, taps: list[int]) -> Iterator[dict[int, Tensor]]:
    """Fills a dict by tap [B, T, D] while the model runs inside the block.

    Args:
        layers: the decoder's.
        taps: i is the input of layer i (transformers' hidden_states[i]); L, their number, is the
            raw output of the last layer, before the final norm.
    """
    states: dict[int, Tensor] = {}
    hooks = [_hook(layers, tap, states) for tap in taps]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _hook(layers: nn.ModuleList, tap: int, states: dict[int, Tensor]) -> Any:
    if tap < len(layers):

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[tap] = args[0] if args else kwargs["hidden_states"]

        return layers[tap].register_forward_pre_hook(before, with_kwargs=True)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        states[tap] = output[0] if isinstance(output, tuple) else output

    return layers[-1].register_forward_hook(after)


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The list of a decoder's layers.

    Raises:
        InputError: there is none of `count` layers.
    """
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise InputError(
        f"target {type(decoder).__name__}: no list of {count} layers found",
        "Supported are decoder-only transformers models.",
    )
