"""The dense weights of a target that new heads may start from.

Shape suffixes: D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.spec import TargetWeights
from .offload import in_memory

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}


def target_weights(
    decoder: nn.Module,
    layers: nn.ModuleList,
    lm_head: Callable[[Tensor | None], Tensor],
    device: torch.device,
) -> TargetWeights:
    """What there is of it, before any linear is packed."""
    paths = (*LINEARS, *NORMS, "self_attn.q_norm")
    named = [(path, module) for path, module in layers[-1].named_modules() if path in paths]
    modules: dict[str, Any] = {path: in_memory(module, device) for path, module in named}
    last_layer = {
        path.split(".")[1]: modules[path].weight.detach()
        for path in LINEARS
        if type(modules.get(path)) is nn.Linear
    }
    if "self_attn.q_norm" in modules:  # without their norms these would give wild attention
        last_layer = {n: w for n, w in last_layer.items() if n not in ("q_proj", "k_proj")}
    for path, name in NORMS.items():
        if (scale := norm_scale(modules.get(path))) is not None:
            last_layer[name] = scale
    children = [child for child in decoder.children() if _width(child)]
    scale = norm_scale(in_memory(children[-1], device)) if children else None
    return TargetWeights(lm_head, scale, last_layer)


@torch.no_grad()
def norm_scale(norm: nn.Module | None) -> Tensor | None:
    """[D] what a norm multiplies by, however it stores that: its odd part at an input of mean 0
    and unit size."""
    if norm is None or not (width := _width(norm)):
        return None
    weight = next(norm.parameters())
    x_D = torch.ones(width, dtype=weight.dtype, device=weight.device)
    x_D[1::2] = -1
    return (norm(x_D[None]) - norm(-x_D[None]))[0] / 2 * x_D


def _width(module: nn.Module) -> int:
    """Width of a norm; 0 for other modules."""
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 1 else 0
