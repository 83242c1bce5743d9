"""One process of training runs that keep more than train.py does: `worker.py JOBS.json`.

A job is [CONFIG, OUT, DOUBLE]; jobs run one after the other, since starting Python takes longest.
OUT/gradient-N.pt holds the whole gradient of each parameter in step N of the job, before clipping.
DOUBLE runs target and head in float64, for comparisons that rounding must not blur.
"""

import json
import os
import sys
from itertools import count
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from training import make_double, train

from selfdraft.inference.target import TargetModel
from selfdraft.train import engine, setup
from selfdraft.train.config import TrainConfig, load_config
from selfdraft.train.ranks import is_main

REAL = {kind: kind.step for kind in (engine.Engine, engine.ZeroEngine)}
LOAD, BUILD = setup.load_target, setup.build_head


def keep_gradients(out: Path) -> None:
    """Wraps the step of both engines."""
    steps = count(1)

    def keep(self) -> None:
        found, step = [gradient(p) for p in self.parameters], next(steps)
        if is_main() and step <= 4:
            out.mkdir(parents=True, exist_ok=True)
            torch.save(found, out / f"gradient-{step}.pt")

    for kind, real in REAL.items():
        kind.step = lambda self, lr, real=real: (keep(self), real(self, lr))[1]


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Whole, also where ZeRO or FSDP2 has cut it up; all processes ask for it."""
    if isinstance(parameter, DTensor):
        return parameter.grad.full_tensor()
    if not hasattr(parameter, "_hp_mapping"):
        return parameter.grad.clone()
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def set_precision(double: bool) -> None:
    """float64 everywhere, or what the config says."""
    setup.load_target = (lambda config: make_double()) if double else LOAD
    setup.build_head = (lambda *args: BUILD(*args).double()) if double else BUILD


def sharded_accelerator(config: TrainConfig, target: TargetModel) -> Accelerator:
    """accelerate never chooses FSDP on a CPU, but shards there as on a GPU once it is told to."""
    accelerator = Accelerator(cpu=True)
    plugin = {"auto_wrap_policy": "no_wrap", "state_dict_type": "FULL_STATE_DICT"}
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False, **plugin
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def work(config: str, out: str, double: bool) -> None:
    """One job."""
    keep_gradients(Path(out))
    set_precision(double)
    try:
        train(load_config(config))
    finally:
        set_precision(False)
        for kind, real in REAL.items():
            kind.step = real


if __name__ == "__main__":
    if "FSDP2_ON_CPU" in os.environ:
        setup.make_accelerator = sharded_accelerator
    # The jobs share one group: a second one of the same name would meet the first one's addresses.
    PartialState.destroy_process_group = lambda *_: None
    for job in json.loads(Path(sys.argv[1]).read_text()):
        work(*job)
