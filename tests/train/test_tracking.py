"""metrics.jsonl and W&B: a tracker never asks, never hangs and never stops a run (W4, W2)."""

import importlib.util
import json
import math

import pytest
from training import make_config, metrics, train

from selfdraft.heads.errors import InputError
from selfdraft.train import checkpoint, setup, tracking
from selfdraft.train.config import TrackingConfig
from selfdraft.train.tracking import MetricsFile, Tracker, wandb_mode

WANDB = {"tracker": "wandb"}


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    """No API key anywhere, no network for wandb, nobody to answer a prompt."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked the user"))


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


def test_an_offline_run_keeps_its_data_on_disk(tmp_path, capsys):
    """W4 (a), with wandb itself."""
    train(make_config(tmp_path, tracking=WANDB))
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    assert "wandb: offline" in capsys.readouterr().out
    assert len(metrics(tmp_path / "run")) == 8


def test_what_is_sent(tmp_path, fake):
    train(make_config(tmp_path, tracking={**WANDB, "project": "p", "name": "n"}))
    assert fake.axes == [("step", None), ("*", "step")]
    (options,) = fake.calls
    assert (options["project"], options["name"], options["mode"]) == ("p", "n", "offline")
    first = fake.points[0]
    assert first["step"] == 1 and {"loss", "lr", "loss_k/1", "top1_k/3"} <= first.keys()
    assert any("eval/tau" in point for point in fake.points)
    assert fake.points[-1] == {"finished": True}


def test_a_resumed_run_keeps_its_id(tmp_path, fake):
    """W2: the id is in the checkpoint; steps are our own axis, so that they may repeat."""
    train(make_config(tmp_path, tracking=WANDB))
    saved = checkpoint.latest(tmp_path / "run").state["tracker_id"]
    train(make_config(tmp_path, tracking=WANDB, resume="latest", schedule={"steps": 8}))
    first, second = fake.calls
    assert first["id"] == second["id"] == saved and second["resume"] == "allow"


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


def test_a_tracker_that_does_not_start_says_what_to_do(tmp_path, monkeypatch):
    import wandb

    def fails(**options):
        raise wandb.errors.CommError("timed out")

    monkeypatch.setattr(wandb, "init", fails)
    with pytest.raises(InputError, match=r"timed out\n.*tracking.mode=offline"):
        train(make_config(tmp_path, tracking=WANDB))


def test_nothing_is_tracked_unless_asked(tmp_path):
    tracker = Tracker(None, make_config(tmp_path), None)
    tracker.log({"step": 1})
    assert tracker.run_id is None
