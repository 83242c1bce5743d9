"""Targets that no single device holds: a device map of transformers spreads their modules over
devices, memory and disk, and accelerate's hooks bring weights in while a module runs.

Here weights are read where no module runs: those that lie elsewhere are on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

HOOKS = ("forward", "_old_forward", "_hf_hook")
"""What accelerate puts into a module's own attributes."""


def home(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: the device of its first weight that is in memory."""
    devices = [parameter.device for parameter in model.parameters()]
    there = [device for device in devices if device.type != "meta"]
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return there[0] if there else torch.device("cpu") if offloaded else devices[0]


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, in the order of names; one at a time is in memory."""
    owners = dict(model.named_modules())
    for name, parameter in sorted(model.named_parameters(), key=lambda named: named[0]):
        path, _, leaf = name.rpartition(".")
        yield name, _read(owners[path], leaf, parameter)


def in_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """The module itself or, where it is not at `device` alone, a copy of it that is."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return module
    whole = copy.copy(module)
    for name in HOOKS:
        whole.__dict__.pop(name, None)
    whole._parameters = {
        name: None
        if parameter is None
        else nn.Parameter(_read(module, name, parameter).to(device), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    whole._buffers = {n: None if b is None else b.to(device) for n, b in module._buffers.items()}
    return whole


def _read(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
    stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if not parameter.is_meta or stored is None:
        return parameter
    return stored[name].to(parameter.dtype)
