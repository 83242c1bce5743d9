"""Variants of a config with several seeds: what each gains, and how their trainings run."""

import json
from types import SimpleNamespace

import pytest
import training
from comparisons import place

from selfdraft.scripts import runs, sweep
from selfdraft.train import checkpoint
from selfdraft.train.config import TrainConfig


def test_a_sweep_says_what_each_variant_gains(tmp_path, monkeypatch, capsys):
    """Two seeds; trained in this process, to save time."""
    made: list[TrainConfig] = []

    def start_here(variant, lock, jobs):
        made.append(variant.config)
        training.train(variant.config)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(runs, "start", start_here)
    arguments = [*place(tmp_path), "--steps", "4", "--seeds", "0,1"]
    (tmp_path / "v.yaml").write_text(
        "tv: {head.loss: tv}\nwide: {head.width: 256}\nother_rows: {schedule.batch_size: 1}\n"
    )
    arguments += ["--variants", str(tmp_path / "v.yaml")]
    assert sweep.main(arguments) == 0
    assert [c.seed for c in made] == [0] * 4 + [1] * 4
    assert {c.schedule.steps for c in made} == {4} and len({c.output_dir for c in made}) == 8
    report = json.loads((tmp_path / "results" / "heads.json").read_text())
    base, tv, wide, other_rows = report["rows"]
    assert base["gain"] == base["gain_se"] == 0 and tv["sets"] == {"head.loss": "tv"}
    gains = [a["tau"] - b["tau"] for a, b in zip(tv["runs"], base["runs"], strict=True)]
    assert tv["gain"] == pytest.approx(sum(gains) / 2)
    assert tv["gain_se"] == pytest.approx(abs(gains[0] - gains[1]) / 2)
    folders = [made[place].output_dir for place in (1, 5, 0, 4)]
    fourth = [training.metrics(folder)[3]["tau"] for folder in folders]
    assert [run["step_tau"] for run in (*tv["runs"], *base["runs"])] == fourth
    assert tv["step_gain"] == pytest.approx((fourth[0] + fourth[1] - fourth[2] - fourth[3]) / 2)
    assert tv["compared_steps"] == "4-4"
    assert "step_tau" not in other_rows and "gain" in other_rows
    assert {entry["trained"] for entry in report["rows"]} == {"4 steps"}
    assert wide["parameters"] > base["parameters"] and wide["draft_ms"] > 0
    assert "| wide |" in capsys.readouterr().out
    assert "| wide |" in (tmp_path / "results" / "heads.md").read_text()
    assert sweep.main(arguments) == 0 and len(made) == 8
    assert sweep.main([*arguments, "--minutes", "0.002"]) == 0 and len(made) == 16
    assert {c.schedule.minutes for c in made[8:]} == {0.002}
    report = json.loads((tmp_path / "results" / "heads.json").read_text())
    assert [entry["trained"] for entry in report["rows"]] == ["0.002 minutes"] * 4 + ["4 steps"] * 4
    assert report["rows"][4] == base | {"draft_ms": report["rows"][4]["draft_ms"]}


def test_trainings_run_side_by_side_and_one_that_fails_ends_the_others(tmp_path, capfd):
    """The one that goes on has saved its step."""
    (tmp_path / "v.yaml").write_text("broken: {optim.lr: 1.0e+38, optim.clip: 1.0e+38}\n")
    arguments = [*place(tmp_path, schedule={"eval_every": 5}), "--seeds", "0", "--minutes", "20"]
    arguments += ["--variants", str(tmp_path / "v.yaml")]
    for bound in ("--steps", "--minutes"):
        assert sweep.main([*arguments, bound, "0"]) == 2
        assert capfd.readouterr().err.startswith(f"{bound} is 0")
    assert sweep.main([*arguments, "--jobs", "0"]) == 2 and "--jobs is 0" in capfd.readouterr().err
    assert sweep.main([*arguments, "--jobs", "2"]) == 2
    shown = capfd.readouterr()
    assert "[1/2] base" in shown.out and "training broken ended with exit code" in shown.err
    (base,) = (tmp_path / "all").glob("base-*/checkpoints")
    assert checkpoint.latest(base.parent) is not None


def test_a_signal_that_comes_when_all_is_trained_ends_the_command_too():
    with pytest.raises(SystemExit) as caught:
        runs._wait([], 0, [15])
    assert caught.value.code == 143
