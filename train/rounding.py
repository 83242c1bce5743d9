"""How features are rounded to be stored, and what they read back as.

float32 keeps them, bfloat16 keeps 8 bits of each number (relative error at most 2^-8), int8 keeps
a block of channels as whole multiples of 1/127 of its largest magnitude m (error at most m / 254),
with m / 127 as a float32 beside it.

Shape suffixes: D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..heads.protocols import Features

BLOCK = 64
"""Channels that share a scale in int8, where they divide the width."""
SCALE = "_scale"
EXACT = ("log_z",)
"""Features that are no states: stored and read as they are."""


def encode(features: Features, dtype: str) -> Features:
    """Features [.., D] as they are stored; int8 adds NAME_scale [.., D / block] for each."""
    if dtype != "int8":
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        return {name: value.to(kind) for name, value in features.items()}
    stored = {}
    for name, value in features.items():
        stored[name], stored[name + SCALE] = _to_int8(value)
    return stored


def decode(stored: Features, dtype: torch.dtype) -> Features:
    """What `encode` has kept of features, as `dtype`; those of `EXACT` unchanged."""
    names = [name for name in stored if not name.endswith(SCALE)]
    return {
        name: stored[name]
        if name in EXACT
        else _read(stored[name], stored.get(name + SCALE)).to(dtype)
        for name in names
    }


def bytes_a_state(width: int, dtype: str) -> int:
    """Size of one stored state [D]."""
    return sum(t.nbytes for t in encode({"state": torch.zeros(width)}, dtype).values())


def _to_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    blocks = value.float().unflatten(-1, (-1, math.gcd(value.shape[-1], BLOCK)))
    scale = blocks.abs().amax(-1) / 127
    whole = (blocks / scale.masked_fill(scale == 0, 1)[..., None]).round()
    return whole.to(torch.int8).flatten(-2), scale


def _read(value: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return value
    blocks = value.float().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale[..., None]).flatten(-2)
