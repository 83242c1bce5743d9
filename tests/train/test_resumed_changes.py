"""A run is resumed with something changed or broken: each has one right outcome."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from training import make_config, metrics, train

from selfdraft.heads.errors import InputError
from selfdraft.heads.files import sha256
from selfdraft.train import trainer
from selfdraft.train.checkpoint import latest, numbered
from selfdraft.train.limits import Limits, score

SCHEDULE = {"steps": 4, "eval_every": 2, "save_every": 2, "keep_last": -1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    train(make_config(folder, schedule=SCHEDULE))
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """The same run, free to be damaged."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_another_select_forgets_the_scores_of_the_first(copy):
    """Patience never compares unlike figures; the best head is judged by its own new figure."""
    checkpoint = latest(copy / "run")
    assert checkpoint.state["select"] == "tau" and len(checkpoint.state["scores"]) == 2
    head = json.loads((copy / "run" / "head.json").read_text())
    state = checkpoint.folder / "state.json"
    assert state.is_file() and head["tau_t1"] is not None
    schedule = {**SCHEDULE, "steps": 8, "select": "tau_t1"}
    config = make_config(copy, schedule=schedule, resume="latest")
    assert Limits(config.schedule, checkpoint.state).scores == []
    with pytest.warns(UserWarning, match=r"judged by tau, schedule\.select is now tau_t1: .*from"):
        train(config)
    after = latest(copy / "run").state
    evaluated = [line["eval"]["tau_t1"] for line in metrics(copy / "run") if "eval" in line]
    assert after["scores"] == evaluated[2:] and after["select"] == "tau_t1"
    best = json.loads((copy / "run" / "head.json").read_text())["tau_t1"]
    assert best == max(head["tau_t1"], *evaluated[2:])


def test_the_same_select_says_nothing_and_keeps_them(copy, recwarn):
    train(make_config(copy, schedule={**SCHEDULE, "steps": 6}, resume="latest"))
    assert len(latest(copy / "run").state["scores"]) == 3
    assert not [w for w in recwarn if "judged by" in str(w.message)]


def test_a_field_that_is_gone_and_changed_nothing_is_no_matter(copy):
    """Of a checkpoint of an earlier release; its checksum is that of the file as it was."""
    folder = latest(copy / "run").folder
    path = folder / "state.json"
    state = json.loads(path.read_text())
    state["head"]["config"]["reach"] = 0.0
    path.write_text(json.dumps(state))
    sums = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps(sums | {"state.json": sha256(path)}))
    more = {**SCHEDULE, "steps": 6}
    assert train(make_config(copy, schedule=more, resume="latest")).step == 6


@pytest.mark.parametrize("head", [{"draft_coverage": 0.9}, {"draft_vocab": 32}])
def test_the_draft_vocabulary_is_the_saved_one_whatever_the_data(tmp_path, head):
    head = {"draft_vocab": None, **head}
    train(make_config(tmp_path, head=head, schedule=SCHEDULE))
    before = latest(tmp_path / "run").weights()["draft_ids"]
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("dog", "vixen").replace("the", "quiz"))
    more = {**SCHEDULE, "steps": 6}
    with pytest.warns(UserWarning, match="trained with other rows"):
        train(make_config(tmp_path, head=head, schedule=more, resume="latest"))
    after = latest(tmp_path / "run")
    assert after.step == 6 and torch.equal(after.weights()["draft_ids"], before)


def test_nan_is_never_better(tmp_path, monkeypatch):
    """Neither than a number nor for patience; and the first number is better than it."""
    schedule = make_config(tmp_path).schedule
    assert score({"tau": math.nan}, schedule) == -math.inf
    real, taus = trainer.measure, iter([math.nan, 2.0, math.nan, 1.5])

    def measured(*arguments):
        return real(*arguments) | {"tau": next(taus)}

    monkeypatch.setattr(trainer, "measure", measured)
    result = train(make_config(tmp_path, schedule={**SCHEDULE, "steps": 8, "patience": 9}))
    text = (tmp_path / "run" / "head.json").read_text()
    head = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (head["step"], head["tau"], result.tau) == (4, 2.0, 2.0)
    assert latest(tmp_path / "run").state["scores"] == [-math.inf, 2.0, -math.inf, 1.5]


def test_with_no_whole_checkpoint_left_nothing_is_overwritten(copy):
    run = copy / "run"
    for _, folder in numbered(run):
        (folder / "optimizer.pt").write_bytes(b"")
    before = (run / "metrics.jsonl").read_bytes()
    config = make_config(copy, schedule={**SCHEDULE, "steps": 6}, resume="latest")
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match=r"no checkpoint of .*run is whole: step-4, step-2\n.*move"),
    ):
        train(config)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_finished_checkpoint_of_elsewhere_is_no_finished_run_here(copy, capsys):
    there, here = copy / "run" / "checkpoints" / "step-4", copy / "other"
    fields = {"resume": str(there), "output_dir": str(here)}
    with pytest.raises(InputError, match=r"no step left for .*other\nRaise the limit"):
        train(make_config(copy, schedule=SCHEDULE, **fields))
    more = {**SCHEDULE, "steps": 6}
    assert train(make_config(copy, schedule=more, **fields)).step == 6
    assert latest(here).step == 6 and latest(copy / "run").step == 4
    assert (here / "model.safetensors").is_file()


def test_what_goes_by_held_out_rows_needs_some(tmp_path):
    """Refused by the config, and where too few prompts are there to hold any out."""
    for schedule in ({"patience": 2}, {"select": "mean"}):
        with pytest.raises(ValueError, match=r"patience and schedule\.select go by held-out"):
            make_config(tmp_path, schedule=schedule, data={"eval_prompts": 0})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    config = make_config(tmp_path, schedule={"patience": 2})
    with (
        pytest.warns(UserWarning, match="only 0 of 3"),
        pytest.raises(InputError, match=r"patience 2 .*none of the 3 rows is held out\nRaise"),
    ):
        train(config)
