"""What a run reports: lines on the terminal, metrics.jsonl, and W&B or TensorBoard when asked.

A tracker never stops training: what it raises is one warning, and metrics.jsonl has everything.
"""

from __future__ import annotations

import importlib.util
import json
import math
import netrc
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml
from accelerate import Accelerator

from ..heads import InputError
from ..heads.checkpoint import DESCRIPTION, WEIGHTS, replace_file
from .config import TrackingConfig, TrainConfig
from .ranks import is_main, say
from .samples import COLUMNS, Sample

METRICS = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: one JSON object a line, in steps that rise."""

    def __init__(self, output_dir: str | Path, step: int) -> None:
        """Drops lines after `step`, which a resumed run writes again, and a torn last line."""
        path = Path(output_dir) / METRICS
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = "".join(line for line in lines if _step(line) <= step)
        replace_file(path, lambda to: Path(to).write_text(kept))
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def write(self, values: dict[str, Any]) -> None:
        """Appends a line; infinities and NaN become null, as JSON has neither."""
        self.file.write(json.dumps(finite(values)) + "\n")


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def finite(value: Any) -> Any:
    """A JSON value in which infinities and NaN are null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_tracker(config: TrackingConfig) -> None:
    """Before anything slow: is the tracker there, and can it be used as asked?

    Raises:
        InputError: it is not installed, or W&B is to be online and there is no API key.
    """
    if config.tracker == "none":
        return
    if importlib.util.find_spec(config.tracker) is None:
        raise InputError(
            f"tracking.tracker is {config.tracker}, which is not installed",
            f'Install it (pip install "selfdraft[{config.tracker}]") or set tracking.tracker=none.',
        )
    if config.tracker == "wandb":
        wandb_mode(config)


def wandb_mode(config: TrackingConfig) -> str:
    """The mode of W&B, with `auto` resolved; never by a prompt.

    Raises:
        InputError: online without an API key.
    """
    mode, named = str(config.mode), "tracking.mode"
    if mode == "auto" and (chosen := os.environ.get("WANDB_MODE")):
        mode, named = chosen, "WANDB_MODE"
    elif mode == "auto":
        mode = "online" if _has_key() else "offline"
    if mode == "online" and not _has_key():
        raise InputError(
            f"{named} is online and there is no W&B API key",
            "Run `wandb login`, set WANDB_API_KEY, or set tracking.mode=offline.",
        )
    return mode


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    default = Path.home() / ("_netrc" if os.name == "nt" else ".netrc")
    try:
        found = netrc.netrc(os.environ.get("NETRC", str(default)))
        return found.authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Tracker:
    """Nothing is tracked; and what trackers have in common.

    Attributes:
        run_id: kept in checkpoints, so that a resumed run goes on under the same id; None where
            the tracker has no ids.
    """

    run_id: str | None = None

    def __init__(self, accelerator: Accelerator, config: TrainConfig) -> None:
        self.accelerator, self.config = accelerator, config
        self.live = self.warned = False

    def start(self, step: int) -> None:
        """Opens the run, which has done `step` steps."""

    def log(self, values: dict[str, Any]) -> None:
        """Sends one point, `step` in it; lists become one curve an entry."""

    def log_samples(self, step: int, samples: Callable[[], list[Sample]]) -> None:
        """Shows generations of the head that is the best so far; they are made if asked for."""

    def log_head(self, folder: Path) -> None:
        """Keeps the final head."""

    def finish(self) -> None:
        """Closes the run and the process group."""
        with self.guarded("did not close"):
            for tracker in self.accelerator.trackers:
                tracker.finish()
        self.accelerator.state.destroy_process_group()

    @contextmanager
    def guarded(self, what: str = "failed") -> Iterator[None]:
        """Reports what a tracker raises (network, quota, its own service), once a run and at its
        end."""
        try:
            yield
        except Exception as error:
            if not self.warned or what != "failed":
                warnings.warn(
                    f"tracking {what} ({error}); training goes on, {METRICS} has everything",
                    stacklevel=4,
                )
            self.warned = True

    def _open(self, project: str, config: dict[str, Any] | None, options: dict[str, Any]) -> bool:
        """One try at starting accelerate's tracker."""
        self.accelerator.trackers.clear()
        with self.guarded("did not start"):
            name = self.config.tracking.tracker
            self.accelerator.init_trackers(project, config, {name: options})
            return True
        self.accelerator.trackers.clear()
        return False


class WandbTracker(Tracker):
    """Weights & Biases: one run for all processes, and for all that are resumed from it."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, run_id: str | None) -> None:
        super().__init__(accelerator, config)
        self.run_id, self.mode = run_id or secrets.token_hex(4), wandb_mode(config.tracking)

    def start(self, step: int) -> None:
        """See `Tracker.start`; a run that cannot start online is kept offline."""
        config, folder = self.config, self.config.output_dir
        options = {"id": self.run_id, "resume": "allow", "dir": folder}
        options["name"] = config.tracking.name
        resolved = config.model_dump(mode="json")
        for mode in dict.fromkeys([self.mode, "offline"]):
            self.live = self._open(config.tracking.project, resolved, options | {"mode": mode})
            if self.live:
                if mode == "offline":
                    say(f"wandb: offline, kept in {folder}/wandb; `wandb sync` sends it later")
                break
        self.live &= is_main()
        if self.live:
            self.run = self.accelerator.get_tracker("wandb", unwrap=True)
            # Our own axis: wandb's counter would refuse the steps that a resumed run repeats.
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        """See `Tracker.log`."""
        if self.live:
            with self.guarded():
                self.run.log(_flat(values))

    def log_samples(self, step: int, samples: Callable[[], list[Sample]]) -> None:
        """See `Tracker.log_samples`: a Table."""
        if self.live and self.mode != "disabled":
            import wandb

            with self.guarded():
                table = wandb.Table(columns=list(COLUMNS), data=[list(s) for s in samples()])
                self.run.log({"samples": table, "step": step})

    def log_head(self, folder: Path) -> None:
        """See `Tracker.log_head`: an Artifact."""
        if self.live and self.mode != "disabled":
            import wandb

            with self.guarded():
                artifact = wandb.Artifact(f"head-{self.run_id}", type="model")
                for name in (DESCRIPTION, WEIGHTS):
                    artifact.add_file(str(folder / name))
                self.run.log_artifact(artifact)


class TensorBoardTracker(Tracker):
    """TensorBoard, below output_dir/tensorboard."""

    def start(self, step: int) -> None:
        """See `Tracker.start`; points after `step`, which a resumed run writes again, go."""
        self.live = self._open("tensorboard", None, {"purge_step": step + 1}) and is_main()
        if self.live:
            self.writer = self.accelerator.get_tracker("tensorboard", unwrap=True)
            text = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
            with self.guarded():
                self.writer.add_text("config", f"```yaml\n{text}```", step)

    def log(self, values: dict[str, Any]) -> None:
        """See `Tracker.log`."""
        if self.live:
            with self.guarded():
                self.accelerator.log(_flat(values), step=values["step"])

    def log_samples(self, step: int, samples: Callable[[], list[Sample]]) -> None:
        """See `Tracker.log_samples`: a text."""
        if self.live:
            with self.guarded():
                blocks = [
                    f"> {s.prompt}\n\n{s.text} ({s.tau:.2f} tokens a round)" for s in samples()
                ]
                self.writer.add_text("samples", "\n\n".join(blocks), step)


def make_tracker(accelerator: Accelerator, config: TrainConfig, run_id: str | None) -> Tracker:
    """The tracker that the config asks for, not yet started."""
    if config.tracking.tracker == "wandb":
        return WandbTracker(accelerator, config, run_id)
    kind = TensorBoardTracker if config.tracking.tracker == "tensorboard" else Tracker
    return kind(accelerator, config)


def _flat(values: dict[str, Any]) -> dict[str, float]:
    """{"top1": [a, b]} as {"top1/1": a, "top1/2": b}; drops what is no number."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{name}": inner for name, inner in _flat(value).items()}
        elif isinstance(value, list):
            flat |= {f"{key}/{place}": inner for place, inner in enumerate(value, start=1)}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if isinstance(value, (int, float))}
