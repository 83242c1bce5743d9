"""However a step is split over rows, micro-steps, processes and engines, it is the same step."""

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import TESTS, finish, start, write_config, zero2
from offline import offline_runs
from safetensors.torch import load_file
from training import WORDS, make_config, metrics, train
from worker import work

from selfdraft.train import checkpoint

WORKER = TESTS / "worker.py"
DOUBLE = {"steps": 20, "eval_every": 20, "save_every": 20}
SINGLE = {"steps": 4, "eval_every": 4, "save_every": 2, "keep_last": -1, "select": "decoded"}
UNEVEN = {"steps": 4, "eval_every": 2, "save_every": 3, "accumulate": 3}
OFFLINE = {"tracker": "wandb", "mode": "offline", "samples": 1}
SPLITS = {"whole": {"batch_size": 4}, "deep": {"batch_size": 1, "accumulate": 4}}


def write_unlike_rows(path: Path, rows: int) -> None:
    """Chats whose answers have from 1 to 70 tokens; a further one has nothing to learn from."""
    dice = random.Random(1)
    with path.open("w") as file:
        for row in range(rows + 1):
            answer = " ".join(dice.choices(WORDS, k=1 if row % 3 else dice.randint(12, 18)))
            answer = answer if row < rows else ""
            turns = [("user", f"question {row}"), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


@dataclass
class Runs:
    """A folder of runs on the same rows, each below its name."""

    root: Path

    def job(self, name: str, double: bool, rows: int = 32, **sections: Any) -> list:
        """[CONFIG, OUT, DOUBLE] of a run, for the worker."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        data = {"eval_prompts": 7, "max_length": 160, "file": str(self.root / f"{rows}.jsonl")}
        if not Path(data["file"]).exists():
            write_unlike_rows(Path(data["file"]), rows)
        config = make_config(folder, data=data, **sections)
        return [str(write_config(folder / "run.yaml", config)), str(folder), double]

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.root / name / "run" / "checkpoints" / f"step-{step}" / WEIGHTS)

    def gradient(self, name: str, step: int = 1) -> list[torch.Tensor]:
        return torch.load(self.root / name / f"gradient-{step}.pt")

    def evals(self, name: str) -> list[dict]:
        return [line["eval"] for line in metrics(self.root / name / "run") if "eval" in line]

    def rows(self, name: str) -> list[list[int]]:
        return [line["rows"] for line in metrics(self.root / name / "run") if "rows" in line]


WEIGHTS = checkpoint.WEIGHTS


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """One process: one batch of 4 rows, and 4 micro-steps of 1; in float64 and in float32."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for split, schedule in SPLITS.items():
        work(*runs.job(f"double-{split}", True, schedule={**DOUBLE, **schedule}))
        work(*runs.job(f"single-{split}", False, schedule={**SINGLE, **schedule}))
    return runs


@pytest.fixture(scope="module")
def two(runs) -> Runs:
    """Two gloo processes through torchrun: the same runs, one on 7 rows, and one that is ended."""
    jobs = [
        runs.job("double-two", True, schedule={**DOUBLE, "batch_size": 2}),
        runs.job("single-two", False, schedule={**SINGLE, "batch_size": 2}),
        runs.job("uneven", False, rows=9, schedule={**UNEVEN, "batch_size": 2}, tracking=OFFLINE),
        runs.job("ended", False, schedule={"steps": 10**6, "batch_size": 2}),
    ]
    file = runs.root / "jobs.json"
    file.write_text(json.dumps(jobs))
    process, give_up = start(2, WORKER, str(file)), time.monotonic() + 400
    ended = runs.root / "ended" / "run" / "metrics.jsonl"
    while not (ended.exists() and len(ended.read_text().splitlines()) > 3):
        if process.poll() is not None or time.monotonic() > give_up:
            pytest.fail(finish(process))
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    (runs.root / "printed").write_text(process.communicate(timeout=120)[0])
    return runs


@pytest.fixture(scope="module", params=["zero", "fsdp2"])
def cut(runs, request) -> tuple[Runs, str]:
    """DeepSpeed ZeRO-2 or FSDP2 in two CPU processes of 2 micro-steps, going on from step 2 of one
    process, and on again after a save in its middle.  (A process holds one such run: DeepSpeed
    keeps the groups of its first.)"""
    name = request.param
    shutil.copytree(runs.root / "single-whole", runs.root / name)
    shutil.rmtree(runs.root / name / "run" / "checkpoints" / "step-4")
    schedule = {**SINGLE, "batch_size": 1, "save_every": 1}
    file = runs.root / f"{name}.json"
    file.write_text(json.dumps([runs.job(name, False, schedule=schedule, resume="latest")]))
    launched = zero2(runs.root) if name == "zero" else {"FSDP2_ON_CPU": "1"}
    finish(start(2, WORKER, str(file), **launched), seconds=400)
    return runs, name


def assert_equal_in_double(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def assert_equal_gradients(one: list, other: list) -> None:
    size = max(float(g.abs().max()) for g in one)
    assert size > 1e-5
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * size)


def test_twenty_steps_do_not_depend_on_accumulation(runs):
    """In float64, to 1e-9; the gradient of a float32 step to 1e-5."""
    assert runs.weights("double-whole", 20)["mlps.0.out.weight"].abs().max() > 1e-3
    assert_equal_in_double(runs.weights("double-whole", 20), runs.weights("double-deep", 20))
    assert_equal_gradients(runs.gradient("single-whole"), runs.gradient("single-deep"))


def test_twenty_steps_do_not_depend_on_processes(two):
    assert_equal_in_double(two.weights("double-whole", 20), two.weights("double-two", 20))
    assert_equal_gradients(two.gradient("single-whole"), two.gradient("single-two"))
    assert two.rows("double-two") == two.rows("double-whole")


def test_held_out_figures_do_not_depend_on_processes(two):
    """R12: 7 rows for two processes in batches of 2, none lost and none twice."""
    (one,), (other,) = two.evals("double-whole"), two.evals("double-two")
    assert one["tau_by_depth"] == other["tau_by_depth"] and one["top1"] == other["top1"]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
    decoded = [two.evals(name)[-1]["tau_decoded"] for name in ("single-whole", "single-two")]
    assert decoded[0] == decoded[1] >= 1


def test_rows_that_fill_no_batch_stop_no_process(two):
    """R8: 7 rows, 12 a step, evaluations and checkpoints at other steps."""
    stream = [row for step in two.rows("uneven") for row in step]
    epochs = [set(stream[start : start + 7]) for start in range(0, 42, 7)]
    assert len(stream) == 48 and all(len(epoch) == 7 for epoch in epochs)
    assert len(two.evals("uneven")) == 2
    saved = checkpoint.numbered(two.root / "uneven" / "run")
    assert [number for number, _ in saved] == [4, 3]


def test_two_processes_are_one_run_of_wandb(two):
    """The figures of both, one axis, the final head."""
    (run,) = offline_runs(two.root / "uneven" / "run")
    assert run.steps == [1, 2, 3, 4] and run.artifacts
    lines = [line for line in metrics(two.root / "uneven" / "run") if "loss" in line]
    sent = [point["loss"] for point in run.points if "loss" in point]
    assert sent == pytest.approx([line["loss"] for line in lines])


def test_a_signal_to_the_launcher_saves_the_step_and_one_process_goes_on(two, capsys):
    """Four rows a step are kept; data order and learning rate go on."""
    folder = two.root / "ended"
    found = checkpoint.latest(folder / "run")
    assert found is not None and found.step >= 3 and found.state["global_batch"] == 4
    assert f"SIGTERM: step {found.step} is saved" in (two.root / "printed").read_text()
    schedule = {"steps": found.step + 2, "batch_size": 2, "eval_every": 10**6}
    data = {"eval_prompts": 7, "max_length": 160, "file": str(two.root / "32.jsonl")}
    train(make_config(folder, data=data, schedule=schedule, resume="latest"))
    assert "accumulate is 2, to keep 4 rows a step" in capsys.readouterr().out
    rows = two.rows("ended")
    assert len(rows) == found.step + 2
    assert rows[:20] == two.rows("double-whole")[: len(rows)]


def test_a_cut_head_goes_on_from_the_checkpoint_of_one_process(cut):
    """The gradient of its first step, learning rates, norms, losses and what it holds out."""
    runs, name = cut
    assert_equal_gradients(runs.gradient("single-whole", step=3), runs.gradient(name))
    lines = [metrics(runs.root / run / "run") for run in ("single-whole", name)]
    for line, other in zip(*lines, strict=True):
        for key in {"rows", "lr", "loss", "loss_k", "top1_k", "grad_norm"} & line.keys():
            assert other[key] == pytest.approx(line[key], rel=1e-4), (key, line["step"])
    decoded = [last["eval"]["tau_decoded"] for (*_, last) in lines]
    assert decoded[0] == decoded[1] >= 1


def test_zero_trains_and_judges_a_target_in_bfloat16(runs):
    """As on a GPU, where the head's weights are float32 and what it reads is not."""
    target = {"dtype": "bfloat16"}
    schedule = {"steps": 2, "eval_every": 2, "save_every": 2, "batch_size": 2}
    work(*runs.job("half", False, target=target, schedule=schedule))
    file = runs.root / "half-zero.json"
    split = {**schedule, "batch_size": 1}
    file.write_text(json.dumps([runs.job("half-zero", False, target=target, schedule=split)]))
    finish(start(2, WORKER, str(file), **zero2(runs.root)), seconds=400)
    (one,), (other,) = runs.evals("half"), runs.evals("half-zero")
    assert other["loss"] == pytest.approx(one["loss"], rel=0.02) and other["tau"] >= 1


def test_the_checkpoint_of_a_cut_head_is_that_of_one_process(cut):
    """Weights, and moments whole and by the parameter's place, which any engine takes up."""
    runs, name = cut
    folders = [runs.root / run / "run" / "checkpoints" for run in ("single-whole", name)]
    expected, found = (checkpoint.load(folder / "step-4") for folder in folders)
    torch.testing.assert_close(found.weights(), expected.weights(), rtol=1e-4, atol=1e-5)
    states = [saved.optimizer()["state"] for saved in (expected, found)]
    assert states[0].keys() == states[1].keys()
    for place, values in states[0].items():
        assert states[1][place]["step"] == values["step"] == 4
        for name in ("exp_avg", "exp_avg_sq"):
            size = float(values[name].abs().max())
            other = states[1][place][name]
            torch.testing.assert_close(other, values[name], rtol=1e-3, atol=1e-4 * size)
