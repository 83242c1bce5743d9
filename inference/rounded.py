"""Products with weights in eight bits, for drafting on a CPU.

A head is read whole for a few rows, so that its bytes are its time.  A draft is a guess: rounding
costs an acceptance now and then, and never changes the law of what is generated.  Each weight row
has its own scale, activations are bfloat16, and a row's result does not depend on the rows beside
it.  The operator is private to PyTorch: it is looked up, tried once, and done without where it is
absent.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import packed

VECTOR = 32  # elements that the operator reads at once, at most
TINY = torch.finfo(torch.float32).tiny


@cache
def rounding_available() -> bool:
    """True when weights can be rounded."""
    return packed.works(_rounded, 0.5)


def product(weight: Tensor, bias: Tensor | None = None) -> packed.Product:
    """x [.., in] -> x W^T + bias [.., out] for drafting: rounded where possible, else packed, else
    PyTorch's own.  No gradient passes through it."""
    return _rounded(weight, bias) if _roundable(weight) else packed.product(weight, bias)


def _roundable(weight: Tensor) -> bool:
    # The operator reads whole vectors, past the end where a row is no multiple of them.
    if not packed.packable(weight) or weight.shape[1] % VECTOR or not rounding_available():
        return False
    # What is not finite has no scale; its products must stay what they are.
    return bool(weight.isfinite().all())


def _rounded(weight: Tensor, bias: Tensor | None) -> packed.Product:
    weight = weight.detach()
    scale_bf16 = (weight.abs().amax(1) / 127).clamp_min(TINY).bfloat16()
    rounded = (weight / scale_bf16.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    operator = torch.ops.aten._weight_int8pack_mm

    def apply(x: Tensor) -> Tensor:
        y = operator(x.flatten(0, -2).bfloat16(), rounded, scale_bf16).to(x.dtype)
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)

    return apply
