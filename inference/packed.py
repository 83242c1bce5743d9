"""Linears whose weight oneDNN has reordered once, for small batches on a CPU.

A plain fp32 product of 2 to 16 rows costs PyTorch twice a product of 1 row; with the reordered
weight it costs about the same, which is what speculation lives on.  The operators are private to
PyTorch: they are looked up, tried once, and done without where they are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
Make = Callable[[Tensor, Tensor | None], Product]

ROWS_HINT = 8  # the width oneDNN is asked to lay the weight out for


def works(make: Make, tolerance: float) -> bool:
    """True when this PyTorch has the operators of `make` and they compute the right product."""
    noise = torch.Generator().manual_seed(0)  # the caller's own is left alone
    weight, x = (torch.randn(rows, 64, generator=noise) for rows in (32, 3))
    try:
        return torch.allclose(make(weight, None)(x), x @ weight.T, atol=tolerance)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


@cache
def packing_available() -> bool:
    """True when linears can be packed."""
    return works(_packed, 1e-4)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    operators = torch.ops.mkldnn
    reordered = operators._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
    return lambda x: operators._linear_pointwise(x, reordered, bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """True for an fp32 CPU weight where the operators exist."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and packing_available()


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """x [.., in] -> x W^T + bias [.., out]: reordered where possible, else PyTorch's own."""
    if packable(weight):
        return _packed(weight, bias)
    return lambda x: nn.functional.linear(x, weight, bias)


class PackedLinear(nn.Module):
    """A frozen nn.Linear on a weight in another form.  No gradient passes through it."""

    def __init__(self, source: nn.Linear, make: Make) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.product = make(source.weight, None if source.bias is None else source.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., in_features].  Returns [.., out_features]."""
        return self.product(x)

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"{self.in_features}, {self.out_features}, packed"


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one parent that read the same input: one product serves all of them."""


class _SharedProduct:
    """The products of several linears with one input, computed when the first of them is asked."""

    def __init__(self, sources: list[nn.Linear], make: Make) -> None:
        weight = torch.cat([source.weight.detach() for source in sources])
        biases = [source.bias.detach() for source in sources if source.bias is not None]
        self.product = make(weight, torch.cat(biases) if biases else None)
        self._memo: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        # Read and written whole, so that two threads can only compute twice, never mix inputs.
        memo = self._memo
        if memo is None or memo[0] is not x:
            memo = (x, self.product(x))
        self._memo = None if last else memo
        return memo[1]


class SharedLinear(nn.Module):
    """One of several linears with the same input.  No gradient passes through it."""

    def __init__(self, shared: _SharedProduct, start: int, source: nn.Linear, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.shared, self.last = shared, last
        self.columns = slice(start, start + source.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., in_features].  Returns [.., out_features]."""
        return self.shared(x, self.last)[..., self.columns]


def pack_linears(model: nn.Module, make: Make = product) -> int:
    """Replaces the linears below `model` in place and frees their weights.

    Args:
        make: gives the product of a weight and a bias.
    Returns:
        how many were replaced; 0 where the operators do not exist.
    """
    count = 0
    for parent in list(model.modules()):
        count += sum(_share(parent, names, make) for names in SIBLINGS)
        for name, child in list(parent.named_children()):
            if is_packable(child):
                setattr(parent, name, PackedLinear(child, make))
                count += 1
    return count


def is_packable(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Would `pack_linears` replace it?"""
    return type(module) is nn.Linear and packable(module.weight)


def _share(parent: nn.Module, names: tuple[str, ...], make: Make) -> int:
    """Replaces siblings by one product, where all are there and alike; returns how many."""
    sources = [getattr(parent, name, None) for name in names]
    if not all(map(is_packable, sources)):
        return 0
    linears = [source for source in sources if isinstance(source, nn.Linear)]
    if len({(source.in_features, source.bias is None) for source in linears}) > 1:
        return 0
    shared, start = _SharedProduct(linears, make), 0
    for name, source in zip(names, linears, strict=True):
        setattr(parent, name, SharedLinear(shared, start, source, name == names[-1]))
        start += source.out_features
    return len(linears)
