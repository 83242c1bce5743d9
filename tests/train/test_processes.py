"""Two processes are one run, and a run moves between one and two."""

import os
import subprocess
import sys

import pytest
import yaml
from training import make_config, metrics, train

from selfdraft.train.config import PACKAGE, TrainConfig

SCHEDULE = {"steps": 4, "eval_every": 2, "save_every": 2}


def torchrun(path, config: TrainConfig) -> None:
    """The root train.py in two processes on gloo."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(PACKAGE / "train.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.proof
def test_two_processes_take_the_steps_of_one(tmp_path):
    """R8, R12: 16 rows in batches of 4 with unequal loss tokens, 3 held-out rows for two processes;
    then each run goes on in one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    data = {"eval_prompts": 3}
    wide = {**SCHEDULE, "batch_size": 2, "accumulate": 2}
    train(make_config(one, data=data, schedule=wide))
    torchrun(tmp_path / "run.yaml", make_config(two, data=data, schedule=SCHEDULE))
    for folder in (one, two):
        train(make_config(folder, data=data, schedule={**wide, "steps": 6}, resume="latest"))
    for line, other in zip(metrics(one / "run"), metrics(two / "run"), strict=True):
        if "eval" in line:
            assert other["eval"]["tau_by_depth"] == line["eval"]["tau_by_depth"]
        for key in {"rows", "loss", "loss_k", "top1_k", "grad_norm"} & line.keys():
            assert other[key] == pytest.approx(line[key], rel=1e-4), (key, line["step"])
