"""What holds during one forward only: hooks that tap hidden states, and evaluation mode.

Shape suffixes: B rows, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from ..heads.errors import InputError


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, none of the modules of a model trains: no dropout.  Afterwards each is as it was.  A
    model that trains is for one thread at a time."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def tapped(layers: nn.ModuleList, taps: list[int]) -> Iterator[dict[int, Tensor]]:
    """Fills a dict by tap [B, T, D] while the model runs inside the block, in the same thread.

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
    thread = get_ident()  # other threads may run the same layers meanwhile

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        # A hook that is removed while another thread comes to it is called without kwargs.
        if get_ident() == thread:
            states[tap] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread:
            states[tap] = output[0] if isinstance(output, tuple) else output

    if tap < len(layers):
        return layers[tap].register_forward_pre_hook(before, with_kwargs=True)
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
