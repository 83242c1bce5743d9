"""A run goes on with the target and the rows that it was trained on; the target is kept nowhere."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import LLAMA, make_config, save_target, train

from selfdraft.heads.errors import InputError
from selfdraft.train import checkpoint
from selfdraft.train.checkpoint import latest


def test_a_checkpoint_holds_the_head_and_its_moments_alone(tmp_path):
    """C6: of a target 20 times the head no tensor; and a changed target is not resumed."""
    base, schedule = tmp_path / "base", {"steps": 2, "save_every": 2, "eval_every": 2}
    save_target(base, {**LLAMA, "num_hidden_layers": 8, "intermediate_size": 256})
    target = {"random": None, "model": str(base)}
    head = {"kind": "hydra", "depth": 1, "width": 16, "draft_vocab": 64}
    run = {"target": target, "head": head, "schedule": schedule}
    train(make_config(tmp_path, **run))
    folder = latest(tmp_path / "run").folder
    weights = load_file(folder / "model.safetensors")
    floats = sum(t.numel() for name, t in weights.items() if name != "draft_ids")
    whole = load_file(base / "model.safetensors")
    assert sum(t.numel() for t in whole.values()) > 20 * floats
    assert weights.keys() == load_file(tmp_path / "run" / "model.safetensors").keys()
    moments = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    shapes = [tuple(state["exp_avg"].shape) for state in moments.values()]
    assert sorted(shapes) == sorted(tuple(weights[n].shape) for n in weights if n != "draft_ids")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3 * 4 * floats + 60_000

    more = {**run, "schedule": {**schedule, "steps": 4}, "resume": "latest"}
    with pytest.warns(UserWarning, match="made with a float32 target; this one is bfloat16"):
        train(make_config(tmp_path, **more | {"target": {**target, "dtype": "bfloat16"}}))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    whole["model.layers.3.mlp.up_proj.weight"][5, 7] += 0.01
    save_file(whole, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"made for another target .*other weights .fingerprint"):
        train(make_config(tmp_path, **more))


def test_a_resume_that_would_see_other_rows_warns(tmp_path, recwarn):
    """A changed file or order; an unchanged one says nothing."""
    config = make_config(tmp_path)
    train(config)

    def again(**data) -> None:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
        train(make_config(tmp_path, data=data, resume="latest"))

    again()
    assert not [warning for warning in recwarn if "trained with other" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"step-3 was trained with other data\.bucket: from here"):
        again(bucket=2)
    path = tmp_path / "data.jsonl"
    path.write_text(path.read_text().replace("dog", "cow"))
    with pytest.warns(UserWarning, match="trained with other rows: from here on"):
        again()


def test_a_checkpoint_older_than_a_head_field_has_its_default(tmp_path):
    config = make_config(tmp_path)
    saved = {"kind": config.head.kind, "config": config.head.model_dump()}
    del saved["config"]["low_rank"], saved["config"]["prior"]
    checkpoint._check_head(saved, config, tmp_path)
    saved["config"]["prior"] = 8
    with pytest.raises(InputError, match="prior 8"):
        checkpoint._check_head(saved, config, tmp_path)


def test_latest_in_an_empty_folder_starts_fresh_and_says_so(tmp_path, capsys):
    (tmp_path / "run" / "features").mkdir(parents=True)
    (tmp_path / "run" / "answers.jsonl.meta.json").write_text("{}")
    train(make_config(tmp_path, resume="latest"))
    assert "starting from step 0" in capsys.readouterr().out


def test_another_run_is_not_mixed_into_one(tmp_path):
    """A named checkpoint of elsewhere goes on in a folder of its own."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        train(make_config(tmp_path / name))
    there = tmp_path / "one" / "run" / "checkpoints" / "step-6"
    before = (tmp_path / "two" / "run" / "metrics.jsonl").read_bytes()
    more = {"schedule": {"steps": 9}, "resume": str(there)}
    with pytest.raises(InputError, match=r"already holds a run, and resume names .*one.*\nPass"):
        train(make_config(tmp_path / "two", **more))
    assert (tmp_path / "two" / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "three").mkdir()
    assert train(make_config(tmp_path / "three", **more)).step == 9


def test_a_head_that_other_rows_have_judged_is_no_measure(tmp_path):
    """Nor are the scores that patience counts."""
    train(make_config(tmp_path))
    path = tmp_path / "run" / "head.json"
    head = json.loads(path.read_text())
    path.write_text(json.dumps(head | {"tau": 99.0}))
    more = {"schedule": {"steps": 9}, "resume": "latest"}
    with pytest.warns(UserWarning, match=r"judged on other held-out rows: .*best head count from"):
        train(make_config(tmp_path, data={"eval_prompts": 3}, **more))
    after = json.loads(path.read_text())
    assert after["tau"] < 99 and after["judged_by"] != head["judged_by"]
    assert len(latest(tmp_path / "run").state["scores"]) == 1


def test_a_head_of_steps_that_a_kill_undid_is_no_measure(tmp_path):
    """They are taken again, and judged again."""
    train(make_config(tmp_path))
    path = tmp_path / "run" / "head.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tau": 99.0, "step": 6}))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    assert train(make_config(tmp_path, resume="latest")).tau < 99
