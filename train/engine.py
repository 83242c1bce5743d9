"""The head inside what accelerate wraps around it: backward, step, and state that fits any of them.

Weights and moments are gathered whole and in PyTorch's own form, so that a checkpoint of one
process, DDP, ZeRO-2 or FSDP2 is taken up by any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Moments = dict[str, Any]
"""As `torch.optim.Optimizer.state_dict`, tensors whole: parameters by their place in the head."""


def uses_deepspeed() -> bool:
    """Was this process launched with a DeepSpeed config?"""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class Engine:
    """A head and its optimizer in one process, under DDP or under FSDP2.

    Attributes:
        head: what forwards of training go through.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float,
    ) -> None:
        self.accelerator, self.clip = accelerator, clip
        self.head, self.optimizer = accelerator.prepare(module, optimizer)
        self.parameters = list(accelerator.unwrap_model(self.head).parameters())

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around forward and backward; gradients cross the processes in the last one alone."""
        with nullcontext() if last else self.accelerator.no_sync(self.head):
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """Around forwards of the bare head, outside of training steps: accelerate has put its own
        into it."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`; over the processes gradients are averaged."""
        self.accelerator.backward(loss)

    def step(self, lr: float) -> float:
        """Clips and takes the step, unless the gradient is not finite.

        Returns:
            the gradient's norm over the whole head, before clipping; the same in all processes.
        """
        norm = float(self.accelerator.clip_grad_norm_(self.head.parameters(), self.clip))
        if torch.tensor(norm).isfinite():
            self._set(lr=lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The head's state dict in float32 masters, whole; every process must ask for it."""
        state = self.accelerator.unwrap_model(self.head).state_dict()
        return {name: _whole(tensor) for name, tensor in state.items()}

    def moments(self) -> Moments:
        """The optimizer's state, whole; every process must ask for it."""
        state = self.optimizer.state_dict()
        # A dict of our own: torch's holds the very dicts that the optimizer goes on with.
        whole = {
            place: {name: _whole(value) for name, value in values.items()}
            for place, values in state["state"].items()
        }
        return {**state, "state": whole}

    def load_moments(self, moments: Moments, **settings: Any) -> None:
        """Takes up `moments`; `settings` of the optimizer stay those given here."""
        self.optimizer.load_state_dict(moments)
        for parameter in self.parameters:
            if isinstance(parameter, DTensor):
                values, mesh = self.optimizer.state[parameter], parameter.device_mesh
                for name in [n for n, v in values.items() if v.shape == parameter.shape]:
                    values[name] = distribute_tensor(values[name], mesh, parameter.placements)
        self._set(**settings)

    def _set(self, **settings: Any) -> None:
        for group in self.optimizer.param_groups:
            group.update(settings)


def _whole(value: Any) -> Any:
    """A sharded tensor gathered, which all processes take part in; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class ZeroEngine(Engine):
    """Under DeepSpeed ZeRO-2, which reduces gradients in each backward, clips and guards by itself,
    and keeps a share of the moments in each process."""

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """See `Engine.micro_step`."""
        self.head.set_gradient_accumulation_boundary(last)
        yield

    def autocast(self) -> AbstractContextManager[None]:
        """See `Engine.autocast`; DeepSpeed's is around its own forward alone."""
        kind, on = self.accelerator.device.type, self.head.torch_autocast_enabled()
        return torch.autocast(kind, self.head.torch_autocast_dtype(), enabled=on)

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`; accelerate's own would take the step as well."""
        self.head.backward(loss)

    def step(self, lr: float) -> float:
        """See `Engine.step`."""
        self._set(lr=lr)
        self.head.step()
        return float(self.head.get_global_grad_norm())

    def moments(self) -> Moments:
        """See `Engine.moments`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = self.head.optimizer.optimizer
        kept = [values for values in inner.state.values() if values]
        names = [n for n, v in kept[0].items() if v.dim()] if kept else []
        state = {
            place: {"step": kept[0]["step"].clone()}
            | {name: safe_get_full_optimizer_state(p, name) for name in names}
            for place, p in enumerate(self.parameters)
            if kept
        }
        group = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
        places = list(range(len(self.parameters)))
        return {"state": state, "param_groups": [group | {"params": places}]}

    def load_moments(self, moments: Moments, **settings: Any) -> None:
        """See `Engine.load_moments`."""
        from deepspeed.utils import safe_set_full_optimizer_state

        zero = self.head.optimizer
        saved = [moments["state"][place] for place in sorted(moments["state"])]
        if saved:
            for flat in zero.single_partition_of_fp32_groups:
                zeros = {n: torch.zeros_like(flat) for n, v in saved[0].items() if v.dim()}
                zero.optimizer.state[flat] = {"step": saved[0]["step"].clone(), **zeros}
            zero._lazy_init_hp_params_optimizer_state()
        for parameter, values in zip(self.parameters, saved, strict=False):
            for name in [n for n, v in values.items() if v.dim()]:
                safe_set_full_optimizer_state(parameter, values[name].to(parameter.device), name)
        self._set(**settings)


def make_engine(
    accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> Engine:
    """The engine for how this process was launched."""
    kind = ZeroEngine if uses_deepspeed() else Engine
    return kind(accelerator, module, optimizer, clip)
