"""Linears whose weight oneDNN has reordered once, for small batches on a CPU.

A plain fp32 product of 2 to 16 rows costs PyTorch twice a product of 1 row; with the reordered
weight it costs about the same, which is what speculation lives on.  The operators are private to
PyTorch: they are looked up, tried once, and done without where they are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

ROWS_HINT = 8  # the width oneDNN is asked to lay the weight out for


@cache
def packing_available() -> bool:
    """True when this PyTorch has the operators and they compute the right product."""
    try:
        weight, x = torch.randn(24, 16), torch.randn(3, 16)
        return torch.allclose(_packed(weight, None)(x), x @ weight.T, atol=1e-4)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    operators = torch.ops.mkldnn
    reordered = operators._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)

    def product(x: Tensor) -> Tensor:
        return operators._linear_pointwise(x, reordered, bias, "none", [], "")

    return product


def packable(weight: Tensor) -> bool:
    """True for an fp32 CPU weight where the operators exist."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and packing_available()


def linear(weight: Tensor, packed: bool) -> Callable[[Tensor], Tensor]:
    """x [.., in] -> x W^T [.., out]; reordered when asked for and possible.

    With packed=False, gradients reach x.
    """
    if packed and packable(weight):
        return _packed(weight, None)
    return lambda x: nn.functional.linear(x, weight)


class PackedLinear(nn.Module):
    """A frozen nn.Linear on a reordered weight.  No gradient passes through it."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        bias = None if source.bias is None else source.bias.detach()
        self.product = _packed(source.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [.., in_features].  Returns [.., out_features]."""
        return self.product(x)

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"{self.in_features}, {self.out_features}, packed"


def pack_linears(model: nn.Module, keep: nn.Module | None = None) -> int:
    """Replaces the linears below `model` in place and frees their weights.

    Args:
        keep: a module left as it is (the lm_head, whose dense weight serves gradients).
    Returns:
        how many were replaced; 0 where the operators do not exist.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not keep and packable(child.weight):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
