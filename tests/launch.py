"""Starting real training processes from a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from selfdraft.train.config import TrainConfig

TESTS = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d"]
TORCHRUN += ["--rdzv_endpoint", "localhost:0", "--nproc_per_node"]
ZERO2 = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
}


def environment(**more: str) -> dict[str, str]:
    """Of a child: one thread, the tests' helper modules on the path, no GPU."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def zero2(folder: Path) -> dict[str, str]:
    """What `accelerate launch` hands to processes that are to run under DeepSpeed ZeRO-2."""
    file = folder / "zero2.json"
    file.write_text(json.dumps(ZERO2))
    named = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    return named | {"DS_ACCELERATOR": "cpu"}


def write_config(path: Path, config: TrainConfig) -> Path:
    """The config as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def start(processes: int, script: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """`script` in that many processes on gloo, through torchrun (one: without it)."""
    launcher = [] if processes == 1 else [*TORCHRUN, str(processes)]
    command = [sys.executable, *launcher, str(script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(**more), **pipes)


def finish(process: subprocess.Popen[str], code: int = 0, seconds: int = 240) -> str:
    """Waits for the exit code that is wanted; returns what was printed."""
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == code, printed
    return printed
