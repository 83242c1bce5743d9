"""What a run reports: lines on the terminal, metrics.jsonl, and Weights & Biases when asked."""

from __future__ import annotations

import importlib.util
import json
import math
import netrc
import os
import secrets
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate import Accelerator
from tqdm.auto import tqdm

from ..heads import InputError
from ..heads.checkpoint import replace_file
from .config import TrackingConfig, TrainConfig

METRICS = "metrics.jsonl"


def is_main() -> bool:
    """Is this the first process?  Works before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str) -> None:
    """One line on the terminal, from the first process alone, beside any progress bar."""
    if is_main():
        tqdm.write(message)


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
        self.file.write(json.dumps(_finite(values)) + "\n")


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wandb_mode(config: TrackingConfig) -> str:
    """The mode of W&B, with `auto` resolved; decided before anything slow, and never by a prompt.

    Raises:
        InputError: wandb is not installed, or online without an API key.
    """
    if importlib.util.find_spec("wandb") is None:
        raise InputError(
            "tracking.tracker is wandb, which is not installed",
            'Install it (pip install "selfdraft[wandb]") or set tracking.tracker=none.',
        )
    mode: str = config.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    if mode == "online" and not _has_key():
        raise InputError(
            "tracking.mode is online and there is no W&B API key",
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
    """W&B through accelerate, or nothing.

    Attributes:
        run_id: kept in checkpoints, so that a resumed run goes on under the same id; None when
            nothing is tracked.
    """

    def __init__(self, accelerator: Accelerator, config: TrainConfig, run_id: str | None) -> None:
        self.accelerator, self.run_id, self.warned = accelerator, None, False
        if config.tracking.tracker != "wandb":
            return
        self.run_id, mode = run_id or secrets.token_hex(4), wandb_mode(config.tracking)
        if mode == "offline":
            say(f"wandb: offline, kept in {config.output_dir}/wandb; `wandb sync` sends it later")
        options = {
            "id": self.run_id,
            "resume": "allow",
            "name": config.tracking.name,
            "mode": mode,
            "dir": config.output_dir,
        }
        try:
            accelerator.init_trackers(
                config.tracking.project, config.model_dump(mode="json"), {"wandb": options}
            )
        except Exception as error:  # whatever a tracker raises: network, quota, its own service
            raise InputError(
                f"wandb does not start: {error}".replace("\n", " "),
                "Check the network and the key, or set tracking.mode=offline.",
            ) from None
        if accelerator.is_main_process:
            run = accelerator.get_tracker("wandb", unwrap=True)
            # Our own axis: wandb's counter would refuse the steps that a resumed run repeats.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        """Sends one point; lists become one curve an entry.  A tracker that fails is reported
        once, and training goes on."""
        if self.run_id is None:
            return
        try:
            self.accelerator.log(_flat(values))
        except Exception as error:  # tracking must never stop training
            if not self.warned:
                warnings.warn(
                    f"tracking failed ({error}); training goes on, {METRICS} has everything",
                    stacklevel=2,
                )
            self.warned = True

    def finish(self) -> None:
        """Closes the run and the process group."""
        try:
            self.accelerator.end_training()
        except Exception as error:  # see log
            warnings.warn(f"tracking did not close: {error}", stacklevel=2)


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
