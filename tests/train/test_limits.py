"""Runs that end by minutes or without gain, and what their best head is judged by."""

import json
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
from training import documents, make_config, metrics, random_head, train

from selfdraft.heads import HEADS, Plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.statistics import Stats
from selfdraft.train import checkpoint, trainer
from selfdraft.train.config import ScheduleConfig
from selfdraft.train.data import Documents
from selfdraft.train.evaluate import evaluate, measure
from selfdraft.train.features import OnlineFeatures
from selfdraft.train.limits import Limits, score
from selfdraft.train.packing import Document, collate
from selfdraft.train.step import Stepper, learning_rate

MINUTES = 0.01


def state(folder: Path) -> dict:
    return checkpoint.latest(folder / "run").state


@pytest.fixture
def slow(monkeypatch) -> None:
    """Steps of a twentieth of a second."""
    real = Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", lambda *a: (time.sleep(0.05), real(*a))[1])


# -- minutes -------------------------------------------------------------------------------------


def test_the_rate_falls_with_the_share_of_time_or_of_steps_whichever_is_further():
    by_steps = [learning_rate(step, 10, 2, 1.0) for step in range(10)]
    by_time = [learning_rate(step, 10**6, 2, 1.0, (step - 2) / 8) for step in range(2, 10)]
    assert by_time == pytest.approx(by_steps[2:], abs=1e-5)
    assert [learning_rate(step, 10, 2, 1.0, 0.0) for step in range(10)] == by_steps
    assert learning_rate(1, 10, 2, 1.0, 0.9) == 1.0  # the warm-up is one of steps
    assert learning_rate(5, 10, 0, 1.0, 1.5) == 0


def test_minutes_end_a_run_and_bring_its_rate_down(tmp_path, slow):
    schedule = {"steps": 10**6, "minutes": MINUTES, "eval_every": 10**6, "save_every": 4}
    schedule["keep_last"] = -1
    assert train(make_config(tmp_path, schedule=schedule)).tau is not None
    lines = metrics(tmp_path / "run")
    rates = [line["lr"] for line in lines if "lr" in line]
    assert 4 <= len(rates) <= 12 and state(tmp_path)["step"] == len(rates)
    assert 60 * MINUTES <= state(tmp_path)["seconds"] < 60 * MINUTES + 0.5
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] < 0.2 * max(rates)
    assert "eval" in lines[-1]


def test_a_resumed_run_goes_on_with_the_time_that_it_has_left(tmp_path, slow, capsys):
    schedule = {"steps": 10**6, "minutes": MINUTES, "eval_every": 10**6, "save_every": 4}
    schedule["keep_last"] = -1
    train(make_config(tmp_path, schedule=schedule))
    for number, folder in checkpoint.numbered(tmp_path / "run"):
        if number > 4:
            shutil.rmtree(folder)
    before = state(tmp_path)["seconds"]
    train(make_config(tmp_path, schedule=schedule, resume="latest"))
    lines = [line for line in metrics(tmp_path / "run") if "lr" in line]
    spent = Limits(ScheduleConfig(**schedule), {"seconds": before}).spent
    assert lines[4]["lr"] == pytest.approx(learning_rate(4, 10**6, 2, 0.01, spent))
    assert state(tmp_path)["seconds"] < 60 * MINUTES + 0.5
    assert train(make_config(tmp_path, schedule=schedule, resume="latest")).step == len(lines)
    assert "schedule.minutes is 0.01; raise it to go on" in capsys.readouterr().out
    longer = {**schedule, "minutes": 2 * MINUTES}
    assert train(make_config(tmp_path, schedule=longer, resume="latest")).step > len(lines)


# -- patience and selection ----------------------------------------------------------------------


def test_a_run_ends_after_evaluations_without_gain_also_when_resumed(tmp_path, monkeypatch):
    given = {2: 1.5, 4: 1.7, 6: 1.6, 8: 1.7, 10: 1.8}

    real, now = trainer.Trainer._evaluate, []

    def noted(self):
        now.append(self.step)
        real(self)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", noted)
    monkeypatch.setattr(trainer, "measure", lambda *a: {**measure(*a), "tau": given[now[-1]]})
    schedule = {"steps": 40, "patience": 2, "eval_every": 2, "save_every": 3, "keep_last": -1}
    assert train(make_config(tmp_path, schedule=schedule)) == trainer.Result(8, 1.7)
    assert json.loads((tmp_path / "run" / "head.json").read_text())["step"] == 4
    whole = metrics(tmp_path / "run")
    for number, folder in checkpoint.numbered(tmp_path / "run"):
        if number > 6:
            shutil.rmtree(folder)
    again = make_config(tmp_path, schedule=schedule, resume="latest")
    assert train(again) == trainer.Result(8, 1.7)
    assert [x.get("eval") for x in metrics(tmp_path / "run")] == [x.get("eval") for x in whole]
    assert train(again).step == 8
    more = {**schedule, "patience": 3, "steps": 10}
    assert train(make_config(tmp_path, schedule=more, resume="latest")).step == 10


@pytest.mark.parametrize(("select", "best"), [("tau", 4), ("tau_t1", 2), ("mean", 6)])
def test_the_best_head_is_the_one_of_the_figure_that_is_asked_for(
    tmp_path, monkeypatch, select, best
):
    taus = iter([(1.0, 2.0), (2.0, 1.0), (1.8, 1.9)])
    monkeypatch.setattr(
        trainer,
        "measure",
        lambda *a: {**measure(*a), **dict(zip(("tau", "tau_t1"), next(taus), strict=True))},
    )
    train(make_config(tmp_path, schedule={"eval_every": 2, "select": select}))
    assert json.loads((tmp_path / "run" / "head.json").read_text())["step"] == best


def test_the_best_head_may_be_the_one_that_decodes_best(tmp_path, monkeypatch):
    """The figure of each evaluation is what this head really decodes, and patience counts it."""
    real, found = trainer.decoded_tau, []

    def noted(weights, head, target, *shown):
        found.append(real(weights, head, target, *shown))
        spec = Speculator(target, head_of(weights, head, target), Plan(depth=3))
        prompts = {tuple(d.ids[: d.loss_mask.index(True)]): None for d in shown[0]}
        stats = Stats()
        for ids in [list(ids) for ids in prompts][:2]:
            more = spec.generate(ids, max_new_tokens=16).stats
            stats.tokens, stats.rows = stats.tokens + more.tokens, stats.rows + 1
            stats.rounds += more.rounds
        assert found[-1] == pytest.approx(stats.tokens_per_round)
        return found[-1]

    monkeypatch.setattr(trainer, "decoded_tau", noted)
    tracking = {"samples": 2, "sample_tokens": 16}
    schedule = {"steps": 80, "eval_every": 10, "select": "decoded", "patience": 1}
    train(make_config(tmp_path, schedule=schedule, tracking=tracking))
    lines = metrics(tmp_path / "run")
    assert [line["eval"]["tau_decoded"] for line in lines if "eval" in line] == found
    assert state(tmp_path)["scores"] == found
    gains = [now > max(found[:place]) for place, now in enumerate(found) if place]
    assert all(gains[:-1]) and (len(found) == 8 or not gains[-1])
    best = json.loads((tmp_path / "run" / "head.json").read_text())
    assert best["tau_decoded"] == max(found)
    assert best["step"] == 10 * (1 + found.index(max(found)))


def head_of(weights, like, target):
    head = HEADS[like.kind](like.config, target.spec, like.draft_ids)
    head.load_state_dict(weights)
    return head.eval()


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({"tracking": {"samples": 0}}, r"tracking\.samples is 0"),
        ({"features": {"cache_only": True}}, "not cache_only"),
    ],
)
def test_decoding_wants_prompts_and_the_whole_target(tmp_path, changed, met):
    data = {key: changed[key] for key in changed if key == "features"}
    sections = {key: changed[key] for key in changed if key == "tracking"}
    with pytest.raises(ValueError, match=met):
        make_config(tmp_path, schedule={"select": "decoded"}, data=data, **sections)


def test_a_head_that_lacks_the_figure_is_no_rival():
    schedule = ScheduleConfig(steps=1, select="mean")
    assert score({"tau": 1.5}, schedule) is None
    assert score({"tau": 1.5, "tau_t1": 2.5}, schedule) == 2.0
    assert score({"tau": 1.5}, ScheduleConfig(steps=1)) == 1.5


# -- tau at temperature 1 ------------------------------------------------------------------------


def split(temperatures: list[float | None]) -> Documents:
    rows = documents([9, 24, 12, 17, 30, 11][: len(temperatures)])
    held = [
        Document(r.ids, r.loss_mask, t, r.row, r.prompt_key)
        for r, t in zip(rows, temperatures, strict=True)
    ]
    return Documents([], held, {}, 0)


@torch.no_grad()
def test_tau_at_temperature_1_is_the_joint_prefix_of_the_answers_drawn_at_it(target, accelerator):
    """In float64, by the laws: mean of prod_{i<k} min(1, q_i/p_i)(x_i) * sum min(p_k, q_k)."""
    head = random_head(target)
    rows = split([0.0, 1.0, 0.7, 1.0, 0.0])
    features = OnlineFeatures(target, head.taps, "float32")
    found = measure(head, rows, features, 2, accelerator)
    totals, counts = [0.0] * 3, [0] * 3
    for document in (rows.held_out[1], rows.held_out[3]):
        batch, states = collate([document]), features.get([document])
        head.eval()
        for t in range(len(document.ids) - 5 - 2, len(document.ids) - 2):
            reached, places = 1.0, [torch.tensor([t])] * 3 + [torch.tensor([0])]
            for k in range(1, 4):
                if t + 1 + k >= len(document.ids):
                    break
                drafts = head.unroll(batch, states, places[:k] + places[3:] * (3 - k))[k - 1][0]
                q = head.spec.logits(drafts).double().softmax(-1)
                p = head.spec.logits(states["hidden"][0, t + k]).double().softmax(-1)
                token = document.ids[t + 1 + k]
                totals[k - 1] += reached * float(torch.minimum(p, q).sum())
                counts[k - 1] += 1
                reached *= min(1.0, float(q[token] / p[token]))
    by_depth = [total / count for total, count in zip(totals, counts, strict=True)]
    assert found["tau_t1_by_depth"] == pytest.approx(by_depth, rel=1e-4)
    assert found["tau_t1"] == pytest.approx(1 + sum(by_depth), rel=1e-4)
    greedy = evaluate(head, rows.eval, features, 2, accelerator)
    assert len(rows.eval) == 2 and found["tau"] == greedy["tau"]


@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [None, None], [1.0, 1.0], [0.7]])
def test_other_answers_give_an_estimate(target, accelerator, temperatures):
    head, rows = random_head(target), split(temperatures)
    features = OnlineFeatures(target, head.taps, "float32")
    found = measure(head, rows, features, 2, accelerator)
    whole = evaluate(head, rows.held_out, features, 1, accelerator)
    assert found["tau_t1"] == pytest.approx(whole["tau_t1"]) and math.isfinite(found["tau_t1"])


def test_evaluations_are_logged_with_both(tmp_path):
    train(make_config(tmp_path))
    evals = [line["eval"] for line in metrics(tmp_path / "run") if "eval" in line]
    assert all(e["tau_t1"] == pytest.approx(1 + sum(e["tau_t1_by_depth"])) for e in evals)
    assert {"tau", "tau_by_depth", "tau_t1", "tau_t1_by_depth", "top1", "loss", "sharpness"} == set(
        evals[0]
    )
