"""Attention of the sequence heads by hand: one query at a time, from the papers' formulas.

Shape suffixes: D hidden width, I what attention reads, E width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfdraft.heads.layers import DecoderLayer


class Seen(NamedTuple):
    """What attention reads at one place, and its rotary position."""

    inputs_I: Tensor
    position: int


def rms(x_D: Tensor, weight_D: Tensor) -> Tensor:
    return x_D / (x_D.pow(2).mean() + 1e-6).sqrt() * weight_D


def turned(x_E: Tensor, position: int) -> Tensor:
    """RoPE of base 10,000, as a product of complex numbers."""
    half = len(x_E) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x_E[:half], x_E[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


def layer_output(layer: DecoderLayer, residual_D: Tensor, query: Seen, seen: list[Seen]) -> Tensor:
    """Output of a decoder layer for `query`, which attends to `seen` (itself included)."""
    width, group = layer.head_width, layer.heads // layer.groups
    heads = []
    for head in range(layer.heads):
        own, shared = (slice(i * width, (i + 1) * width) for i in (head, head // group))
        q = turned((layer.q_proj.weight @ query.inputs_I)[own], query.position)
        keys = [turned((layer.k_proj.weight @ s.inputs_I)[shared], s.position) for s in seen]
        values = [(layer.v_proj.weight @ s.inputs_I)[shared] for s in seen]
        p = (torch.stack(keys) @ q / width**0.5).softmax(0)
        heads.append(p @ torch.stack(values))
    x = residual_D + layer.o_proj.weight @ torch.cat(heads)
    inner = rms(x, layer.mlp_norm.weight)
    gate, up = layer.gate_proj.weight @ inner, layer.up_proj.weight @ inner
    return x + layer.down_proj.weight @ (gate * gate.sigmoid() * up)
