"""metrics.jsonl and W&B: a tracker never asks, never hangs and never stops a run (W4, W2)."""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest
from fixtures import PROMPTS, plain, script, tiny
from offline import offline_runs
from training import make_config, metrics, train

from selfdraft.heads.errors import InputError
from selfdraft.train import checkpoint, setup, tracking
from selfdraft.train.config import TrackingConfig
from selfdraft.train.samples import answer
from selfdraft.train.tracking import MetricsFile, Tracker, make_tracker, wandb_mode

WANDB = {"tracker": "wandb"}


def forget_keys(monkeypatch, folder: Path) -> None:
    """No API key anywhere, no network for wandb, nobody to answer a prompt."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked the user"))


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


class FakeRun:
    """What Tracker needs of a wandb run."""

    def __init__(self) -> None:
        self.axes: list = []
        self.points: list[dict] = []

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values, step=None):
        assert step is None  # our own axis, see Tracker
        self.points.append(values)

    def log_artifact(self, artifact):
        self.points.append({"artifact": artifact.type})

    def finish(self):
        self.points.append({"finished": True})


@pytest.fixture
def fake(monkeypatch):
    """wandb.init replaced; gives the options of each call and the run."""
    import wandb

    run, calls = FakeRun(), []
    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(options) or run)
    monkeypatch.setattr(
        "accelerate.tracking.WandBTracker.store_init_configuration", lambda *a: None
    )
    run.calls = calls
    return run


# -- metrics.jsonl -------------------------------------------------------------------------------


def test_lines_after_the_resumed_step_and_a_torn_one_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5)) + '{"step"')
    MetricsFile(tmp_path, 3).write({"step": 4, "again": True})
    assert metrics(tmp_path)[2:] == [{"step": 3}, {"step": 4, "again": True}]
    MetricsFile(tmp_path, 0)
    assert metrics(tmp_path) == []


def test_every_line_is_json(tmp_path):
    MetricsFile(tmp_path, 0).write({"step": 1, "loss": math.nan, "loss_k": [1.0, math.inf, None]})
    assert metrics(tmp_path) == [{"step": 1, "loss": None, "loss_k": [1.0, None, None]}]


# -- which mode ----------------------------------------------------------------------------------


def test_auto_is_offline_without_a_key_and_online_with_one(monkeypatch, tmp_path):
    auto = TrackingConfig(tracker="wandb")
    assert wandb_mode(auto) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert wandb_mode(auto) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode(auto) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(auto) == "offline"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(InputError, match=r"^WANDB_MODE is online and there is no"):
        wandb_mode(auto)


def test_online_without_a_key_stops_at_once(tmp_path, monkeypatch):
    """W4 (b): before the target loads."""
    monkeypatch.setattr(setup, "load_target", lambda config: pytest.fail("loaded the target"))
    with pytest.raises(InputError, match=r"no W&B API key\n.*tracking.mode=offline"):
        train(make_config(tmp_path, tracking={**WANDB, "mode": "online"}))


def test_wandb_that_is_not_installed_is_named_before_the_target_loads(tmp_path, monkeypatch):
    """W4 (c)."""
    real = importlib.util.find_spec
    monkeypatch.setattr(setup, "load_target", lambda config: pytest.fail("loaded the target"))
    monkeypatch.setattr(
        tracking.importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else real(n, *a)
    )
    with pytest.raises(InputError, match=r"not installed\n.*tracking.tracker=none"):
        train(make_config(tmp_path, tracking=WANDB))


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """With wandb itself: a run saved at step 5 and lost at step 8, which then goes on to 12."""
    folder = tmp_path_factory.mktemp("resumed")
    schedule = {"steps": 8, "save_every": 5, "eval_every": 4}
    with pytest.MonkeyPatch.context() as patch:
        forget_keys(patch, folder)
        train(make_config(folder, tracking=WANDB, schedule=schedule))
        shutil.rmtree(folder / "run" / "checkpoints" / "step-8")
        later = {**schedule, "steps": 12}
        train(make_config(folder, tracking=WANDB, schedule=later, resume="latest"))
    return folder / "run"


def test_an_offline_run_is_read_back_from_disk(resumed):
    """W4 (a), W2: one id, the lost steps again on an axis of our own."""
    first, second = offline_runs(resumed)
    saved = checkpoint.latest(resumed).state["tracker_id"]
    assert first.id == second.id == saved
    assert first.steps == list(range(1, 9)) and second.steps == list(range(6, 13))
    assert second.axes["*"] == "step" == first.axes["*"]
    assert first.config["schedule"]["save_every"] == 5 and first.config["head"]["depth"] == 3
    for name in ("loss", "lr", "loss_k/1", "top1_k/3", "acceptance_k/2", "tau"):
        assert all(name in point for point in first.points if "loss" in point), name
    assert len(metrics(resumed)) == 15


def test_the_samples_and_the_head_are_in_the_run(resumed):
    """A Table with accepted tokens marked; the head as an artifact."""
    first, _ = offline_runs(resumed)
    for table in first.tables():
        assert table["columns"] == ["prompt", "text", "tokens", "tau"]
        assert len(table["data"]) == 4 and all(row[3] >= 1 for row in table["data"])
    assert first.tables()
    assert ("model", {"head.json", "model.safetensors"}) in first.artifacts


def test_what_is_sent(tmp_path, fake):
    train(make_config(tmp_path, tracking={**WANDB, "project": "p", "name": "n"}))
    assert fake.axes == [("step", None), ("*", "step")]
    (options,) = fake.calls
    assert (options["project"], options["name"], options["mode"]) == ("p", "n", "offline")
    first = fake.points[0]
    assert first["step"] == 1 and {"loss", "lr", "loss_k/1", "top1_k/3"} <= first.keys()
    assert any("eval/tau" in point for point in fake.points)
    assert fake.points[-2:] == [{"artifact": "model"}, {"finished": True}]


def test_a_resumed_run_keeps_its_id(tmp_path, fake):
    """W2: the id is in the checkpoint; steps are our own axis, so that they may repeat."""
    train(make_config(tmp_path, tracking=WANDB))
    saved = checkpoint.latest(tmp_path / "run").state["tracker_id"]
    train(make_config(tmp_path, tracking=WANDB, resume="latest", schedule={"steps": 8}))
    first, second = fake.calls
    assert first["id"] == second["id"] == saved and second["resume"] == "allow"


def test_a_run_that_goes_on_elsewhere_is_another_one(tmp_path, fake):
    """Two folders never write to one run."""
    train(make_config(tmp_path, tracking=WANDB))
    there = tmp_path / "run" / "checkpoints" / "step-6"
    fields = {"resume": str(there), "output_dir": str(tmp_path / "fork")}
    train(make_config(tmp_path, tracking=WANDB, schedule={"steps": 8}, **fields))
    first, second = fake.calls
    assert first["id"] != second["id"]


def test_a_lost_id_gives_a_new_run(tmp_path, fake):
    """W2: a checkpoint of a run that tracked nothing, or whose id is gone."""
    train(make_config(tmp_path))
    later = make_config(tmp_path, tracking=WANDB, resume="latest", schedule={"steps": 8})
    assert train(later).step == 8
    (options,) = fake.calls
    assert options["id"] == checkpoint.latest(tmp_path / "run").state["tracker_id"]
    assert [point["step"] for point in fake.points if "loss" in point] == [7, 8]


def test_a_tracker_that_fails_is_one_warning(tmp_path, fake, monkeypatch):
    """W4 (d)."""

    def fails(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(fake, "log", fails)
    monkeypatch.setattr(fake, "finish", fails)
    with pytest.warns(UserWarning) as seen:
        assert train(make_config(tmp_path, tracking=WANDB)).step == 6
    said = [str(w.message) for w in seen if "no route to host" in str(w.message)]
    assert len(said) == 2 and "training goes on" in said[0] and "did not close" in said[1]
    assert len(metrics(tmp_path / "run")) == 8


def test_a_run_that_cannot_start_online_is_kept_offline(tmp_path, fake, monkeypatch):
    """It has come this far, maybe after hours of features; W&B never ends it."""
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "secret")
    real = wandb.init

    def fails(**options):
        if options["mode"] == "online" or not fake.points:
            raise wandb.errors.CommError("timed out")
        return real(**options)

    monkeypatch.setattr(wandb, "init", fails)
    with pytest.warns(UserWarning, match="did not start .timed out.; training goes on"):
        assert train(make_config(tmp_path, tracking=WANDB)).step == 6
    assert not fake.points and not fake.calls
    fake.points.append({})
    with pytest.warns(UserWarning, match="timed out"):
        train(make_config(tmp_path, tracking=WANDB, output_dir=str(tmp_path / "b")))
    assert [call["mode"] for call in fake.calls] == ["offline"] and len(fake.points) > 6


def test_a_disabled_run_leaves_nothing(tmp_path):
    train(make_config(tmp_path, tracking={**WANDB, "mode": "disabled"}))
    assert not list(tmp_path.rglob("*.wandb")) and len(metrics(tmp_path / "run")) == 8


def test_tensorboard(tmp_path):
    """The other tracker, read back: curves, samples and the config; a resume takes over."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = {"tracker": "tensorboard"}
    schedule = {"steps": 6, "save_every": 4, "eval_every": 3}
    train(make_config(tmp_path, tracking=tracking, schedule=schedule))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    later = {**schedule, "steps": 8}
    train(make_config(tmp_path, tracking=tracking, schedule=later, resume="latest"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 9))
    assert {"lr", "loss_k/1", "acceptance_k/3", "eval/tau"} <= set(events.Tags()["scalars"])
    assert {"samples/text_summary", "config/text_summary"} <= set(events.Tags()["tensors"])


class Letters:
    """A tokenizer of one letter an id."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + i % 26) for i in ids)


def test_accepted_tokens_are_marked(monkeypatch):
    """By a drafter that knows the answer: rounds of 2 accepted tokens and of none, each with one
    token of the target's own behind them."""
    target, prompt = tiny(), PROMPTS[1]
    (ids,) = plain(target, [prompt], 12)
    drafter = script(target, pattern=[2, 0])
    monkeypatch.setattr(target, "tokenizer", Letters())
    sample, text = answer(target, drafter, prompt, 12), Letters().decode(ids)
    runs = [text[:1], text[1:3], text[3:5], text[5:7], text[7:9], text[9:11], text[11:]]
    assert sample.text == "".join(f"⟦{t}⟧" if i % 2 else t for i, t in enumerate(runs))
    assert (sample.tokens, sample.prompt) == (12, Letters().decode(prompt))
    assert sample.tau == pytest.approx(11 / 5)


def test_nothing_is_tracked_unless_asked(tmp_path):
    tracker = make_tracker(None, make_config(tmp_path), None)
    tracker.log({"step": 1})
    assert type(tracker) is Tracker and tracker.run_id is None
