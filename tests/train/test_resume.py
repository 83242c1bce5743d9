"""Checkpoints: whole or not there, and a resumed run is the unbroken one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from training import make_config, metrics, train, write_data

from selfdraft.heads.errors import InputError
from selfdraft.train import checkpoint, setup, trainer
from selfdraft.train.checkpoint import latest, prune, random_state, set_random_state
from selfdraft.train.config import PACKAGE, TrainConfig

SCHEDULE = {"steps": 8, "eval_every": 4, "save_every": 2, "keep_last": -1}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """The folder of a run of 8 steps that nothing interrupted."""
    folder = tmp_path_factory.mktemp("unbroken")
    train(make_config(folder, schedule=SCHEDULE))
    return folder


@pytest.fixture
def copy(unbroken, tmp_path) -> Path:
    """The same run, free to be damaged."""
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resumed(folder: Path, steps: int = 8, **sections) -> TrainConfig:
    sections = {"schedule": {**SCHEDULE, "steps": steps}, "resume": "latest", **sections}
    return make_config(folder, **sections)


def keep_until(folder: Path, step: int) -> None:
    """Forgets the checkpoints after `step`, as if the run had been killed before the next one."""
    for number, path in checkpoint.numbered(folder / "run"):
        if number > step:
            shutil.rmtree(path)


def assert_same_run(one: Path, other: Path, step: int = 8) -> None:
    """Weights and optimizer equal bit for bit; the metrics equal but for their speed."""
    first, second = (folder / "run" / "checkpoints" / f"step-{step}" for folder in (one, other))
    for name in ("model.safetensors", "optimizer.pt", "random.pt"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    states = [checkpoint.load(folder).state for folder in (first, second)]
    assert all(state.pop("seconds") > 0 for state in states)
    assert states[0] == states[1]
    lines = [metrics(folder / "run") for folder in (one, other)]
    for line in (*lines[0], *lines[1]):
        line.pop("tokens_per_second", None)
    assert lines[0] == lines[1]


# -- the resumed run -----------------------------------------------------------------------------


def test_a_run_killed_in_the_middle_ends_as_the_unbroken_one(unbroken, tmp_path):
    """kill -9 of the command itself, then `resume=latest`: R1, R3."""
    config = make_config(tmp_path, schedule=SCHEDULE)
    shutil.copy(unbroken / "data.jsonl", config.data.file)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    # Slow enough to be caught between two checkpoints; the data and the steps are the same.
    code = (
        "import sys, time; from selfdraft.train import step; real = step.Stepper.__call__\n"
        "step.Stepper.__call__ = lambda *a: (time.sleep(0.2), real(*a))[1]\n"
        f"sys.argv = ['train.py', {str(path)!r}]\n"
        f"import runpy; runpy.run_path({str(PACKAGE / 'train.py')!r}, run_name='__main__')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        give_up = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step-4").exists():
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert latest(tmp_path / "run").step < 8
    command = [sys.executable, str(PACKAGE / "train.py"), str(path), "resume=latest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(unbroken, tmp_path)


@pytest.mark.parametrize("cache", [True, False])
def test_resuming_at_a_checkpoint(tmp_path, cache):
    data = {"features": {"cache": cache}, "max_length": 96, "eval_prompts": 4}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        data["file"] = str(folder / "data.jsonl")
        write_data(folder / "data.jsonl")
        train(make_config(folder, schedule=SCHEDULE, data=data))
    keep_until(folders[1], 2)
    train(resumed(folders[1], data=data))
    for line in ("model.safetensors", "optimizer.pt"):
        one, two = (f / "run" / "checkpoints" / "step-8" / line for f in folders)
        assert one.read_bytes() == two.read_bytes()


def test_more_steps_go_on_with_the_very_next_batch(tmp_path, capsys):
    """R6: 4 steps an epoch, 7 steps saved every 5, then 12; asked again, nothing is done."""
    write_data(tmp_path / "data.jsonl", rows=10)
    data, schedule = {"eval_prompts": 2}, {"steps": 7, "save_every": 5, "eval_every": 100}
    train(make_config(tmp_path, data=data, schedule=schedule))
    assert latest(tmp_path / "run").step == 7
    longer = {**schedule, "steps": 12}
    more = make_config(tmp_path, data=data, schedule=longer, resume="latest")
    assert train(more).step == 12
    rows = [line["rows"] for line in metrics(tmp_path / "run") if "rows" in line]
    order = [row for step in rows for row in step]
    epochs = [set(order[start : start + 8]) for start in (0, 8, 16)]
    assert len(rows) == 12 and all(len(epoch) == 8 for epoch in epochs)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train(more).step == 12 and "is finished: 12 steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_global_batch_is_kept(copy, capsys):
    keep_until(copy, 4)
    train(resumed(copy, schedule={**SCHEDULE, "batch_size": 1}))
    assert "accumulate is 2, to keep 2 rows a step" in capsys.readouterr().out
    assert [len(line["rows"]) for line in metrics(copy / "run") if "rows" in line] == [2] * 8
    keep_until(copy, 4)
    with pytest.raises(InputError, match="2 rows a step"):
        train(resumed(copy, schedule={**SCHEDULE, "batch_size": 3}))


def test_optimizer_settings_are_the_configs(copy):
    keep_until(copy, 4)
    train(resumed(copy, optim={"weight_decay": 0.25}))
    assert latest(copy / "run").optimizer()["param_groups"][0]["weight_decay"] == 0.25


@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 4), (signal.SIGINT, 3)])
def test_a_signal_saves_the_step_and_leaves(unbroken, tmp_path, monkeypatch, capsys, number, at):
    """Step 4 is evaluated first."""
    shutil.copy(unbroken / "data.jsonl", tmp_path / "data.jsonl")
    real, calls = trainer.Stepper.__call__, []

    def signalled(self, *args):
        calls.append(args)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return real(self, *args)

    monkeypatch.setattr(trainer.Stepper, "__call__", signalled)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        train(make_config(tmp_path, schedule=SCHEDULE))
    assert caught.value.code == 128 + number and signal.getsignal(number) is before
    assert latest(tmp_path / "run").step == at
    assert f"{number.name}: step {at} is saved" in capsys.readouterr().out
    train(resumed(tmp_path))
    assert_same_run(unbroken, tmp_path)


def test_a_head_torn_from_its_weights_is_replaced(unbroken, tmp_path):
    """By the first evaluation of the resumed run, however good the torn one was."""
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    keep_until(tmp_path, 4)
    description = tmp_path / "run" / "head.json"
    torn = json.loads(description.read_text()) | {"tau": 99.0, "sha256": "0"}
    description.write_text(json.dumps(torn))
    train(resumed(tmp_path))
    assert trainer.best_head(tmp_path / "run")["tau"] < 99


# -- what resume does with a folder (F5) ---------------------------------------------------------


def test_a_finished_run_says_so_and_loads_nothing(copy, capsys, monkeypatch):
    monkeypatch.setattr(setup, "load_target", lambda config: pytest.fail("loaded the target"))
    result = train(resumed(copy))
    assert result.step == 8 and result.tau is not None
    assert "is finished: 8 steps" in capsys.readouterr().out


def test_an_earlier_run_is_not_overwritten(copy):
    for _ in ("all of it", "the head alone"):
        with pytest.raises(InputError, match=r"already holds a run\n.*resume=latest"):
            train(make_config(copy, schedule=SCHEDULE))
        shutil.rmtree(copy / "run" / "checkpoints", ignore_errors=True)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_another_head_is_refused(copy, checkpoints):
    if not checkpoints:
        shutil.rmtree(copy / "run" / "checkpoints")
    with pytest.raises(InputError, match="kind 'hydra', the config asks for 'medusa'"):
        train(resumed(copy, head={"kind": "medusa"}))
    with pytest.raises(InputError, match="depth 3, the config asks for 2"):
        train(resumed(copy, head={"depth": 2}))


@pytest.mark.parametrize("checkpoints", [True, False])
def test_another_target_is_refused_also_when_finished(copy, checkpoints):
    """C6."""
    if not checkpoints:
        shutil.rmtree(copy / "run" / "checkpoints")
    with pytest.raises(InputError, match="another target"):
        train(resumed(copy, seed=1))


def test_a_named_checkpoint_must_be_there_whole_and_the_latest(copy):
    folder = copy / "run" / "checkpoints"
    with pytest.raises(InputError, match="there is no checkpoint"):
        train(resumed(copy, resume=str(folder / "step-9")))
    with pytest.raises(InputError, match="step-8 is later than"):
        train(resumed(copy, resume=str(folder / "step-4")))
    keep_until(copy, 4)
    train(resumed(copy, resume=str(folder / "step-4")))
    (folder / "step-8" / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"damaged: model\.safetensors"):
        train(resumed(copy, resume=str(folder / "step-8")))


def test_a_head_without_checkpoints_stays_until_a_better_one(copy):
    shutil.rmtree(copy / "run" / "checkpoints")
    path = copy / "run" / "head.json"
    path.write_text(before := json.dumps({**json.loads(path.read_text()), "tau": 9.0}))
    assert train(resumed(copy)).tau == 9.0
    assert path.read_text() == before


# -- the folders ---------------------------------------------------------------------------------


def test_broken_checkpoints_are_passed_over_with_a_warning(copy):
    folder = copy / "run" / "checkpoints"
    (folder / "step-8" / "complete.json").unlink()
    with open(folder / "step-6" / "optimizer.pt", "ab") as file:
        file.write(b"x")
    with pytest.warns(UserWarning) as seen:
        assert latest(copy / "run").step == 4
    assert ["step-8" in str(w.message) for w in seen] == [True, False]


@pytest.mark.parametrize(
    ("keep", "left"), [(-1, [5, 10, 100]), (0, [100]), (1, [100]), (2, [10, 100])]
)
def test_latest_is_the_highest_number_and_pruning_spares_strangers(copy, keep, left):
    """R7."""
    with pytest.raises(ValidationError, match="keep_last"):
        make_config(copy, schedule={"keep_last": -2})
    folder = copy / "run" / "checkpoints"
    shutil.copytree(folder / "step-8", copy / "one")
    (copy / "run" / "head.json").unlink()
    keep_until(copy, -1)
    for name in ("step-5", "step-10", "step-100", "best", "step-7x"):
        shutil.copytree(copy / "one", folder / name)
    (folder / "step-11").write_text("a stray file")
    assert latest(copy / "run").folder.name == "step-100"
    prune(copy / "run", keep)
    assert sorted(n for n, _ in checkpoint.numbered(copy / "run")) == left
    assert {"best", "step-7x", "step-11"} <= {path.name for path in folder.iterdir()}


def test_the_checkpoint_of_the_best_head_stays(copy):
    """R7, R6: beside the last one; and what a kill left of a save goes at the next."""
    best = json.loads((copy / "run" / "head.json").read_text())["step"]
    folder = copy / "run" / "checkpoints"
    (folder / ".step-6.123").mkdir()
    keep_until(copy, 6)
    train(resumed(copy, schedule={**SCHEDULE, "keep_last": 1}))
    assert [n for n, _ in checkpoint.numbered(copy / "run")] == sorted({8, best}, reverse=True)
    assert not list(folder.glob(".*"))


def test_pruning_never_deletes_the_newest_whole_one(copy):
    (copy / "run" / "head.json").unlink()
    (copy / "run" / "checkpoints" / "step-8" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-8"):
        prune(copy / "run", 1)
    assert [number for number, _ in checkpoint.numbered(copy / "run")] == [8, 6]


def test_random_states_survive_a_file(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    torch.save([random_state()], tmp_path / "r.pt")
    first = draw()
    set_random_state(torch.load(tmp_path / "r.pt", weights_only=True)[0])
    assert draw() == first
