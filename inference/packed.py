"""Linears whose weight is laid out once for products of few rows on a CPU.

A plain fp32 product of 4 to 16 rows costs PyTorch two to five times a product of 1 row; on a weight
that was laid out for it little more than that one, which is what speculation lives on.  Two
libraries inside PyTorch do this, and which is quicker is a matter of the processor.  Their
operators are private to PyTorch: they are looked up, tried once, and done without where they are
absent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
Make = Callable[[Tensor, Tensor | None], Product]

ONEDNN_ROWS, MKL_ROWS = 8, 128
"""Rows that a layout is asked for, by what was quickest; it serves any number of them."""


def works(make: Make, tolerance: float) -> bool:
    """True when this PyTorch has the operators of `make` and they compute the right product."""
    noise = torch.Generator().manual_seed(0)  # the caller's own is left alone
    weight, x = (torch.randn(rows, 64, generator=noise) for rows in (32, 3))
    try:
        return torch.allclose(make(weight, None)(x), x @ weight.T, atol=tolerance)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


@cache
def library() -> str | None:
    """Whose layout is used here: MKL's on an Intel processor under Linux, else oneDNN's; None where
    there are no operators.

    By the processor, not by the clock: results of the two differ in rounding, and a run that goes
    on shall compute what it did.  On two cores of an Intel Xeon with AVX-512, MKL took 0.66, 0.67,
    0.69, 0.75 and 0.83 of oneDNN's time for 1, 4, 8, 16 and 128 rows of SmolLM2-135M's layers.
    Other Intel processors were not at hand; on AMD's it was not tried.
    """
    found = [name for name, make in LIBRARIES.items() if works(make, 1e-4)]
    preferred = "MKL" if "GenuineIntel" in _processor() else "oneDNN"
    return preferred if preferred in found else next(iter(found), None)


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    operators = torch.ops.mkldnn
    laid_out = operators._reorder_linear_weight(weight.detach().contiguous(), ONEDNN_ROWS)
    return lambda x: operators._linear_pointwise(x, laid_out, bias, "none", [], "")


def _mkl(weight: Tensor, bias: Tensor | None) -> Product:
    operators = torch.ops.mkl
    laid_out = operators._mkl_reorder_linear_weight(weight.detach().contiguous(), MKL_ROWS)
    # Of the weight as it was the operator reads the sizes alone, where it is told that the layout
    # is for as many rows as it is given; otherwise it would multiply by that weight.
    sizes = weight.new_empty(1).expand(weight.shape)

    def multiply(x: Tensor) -> Tensor:
        width = x.shape[-1]
        if width != sizes.shape[1]:  # it would read past a row's end
            raise RuntimeError(f"x {tuple(x.shape)} does not fit a weight {tuple(sizes.shape)}")
        return operators._mkl_linear(x, laid_out, sizes, bias, x.numel() // width)

    return multiply


LIBRARIES: dict[str, Make] = {"oneDNN": _onednn, "MKL": _mkl}


def packable(weight: Tensor) -> bool:
    """True for an fp32 CPU weight where the operators exist."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and library() is not None


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """x [.., in] -> x W^T + bias [.., out]: laid out where possible, else PyTorch's own."""
    if packable(weight) and (name := library()):
        return LIBRARIES[name](weight, bias)
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
