"""Trainings that are compared: variants of one config, each for equal minutes or steps.

Each variant has a folder named after everything that it depends on, so a second run takes up what
the first has left, and other settings never meet it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfdraft.heads import HEADS, HeadConfig
from selfdraft.heads.checkpoint import DESCRIPTION, sha256
from selfdraft.heads.errors import InputError, nearest
from selfdraft.scripts.prepare_data import fetch_named
from selfdraft.train import checkpoint
from selfdraft.train.config import TrainConfig, load_config, resolve_path
from selfdraft.train.limits import Limits
from selfdraft.train.overrides import parse_yaml

MANY = 10**6
"""Steps of a run that minutes end."""
SAME = ("steps", "minutes", "patience", "eval_every")
"""Keys of `schedule` that a comparison chooses."""
OPEN = re.compile(r"(head|optim|schedule)\..+|data\.(temperatures|pack|bucket|features\.dtype)")
"""What variants may set: all are judged on the same text of the same target."""


@dataclass(frozen=True)
class Variant:
    """One training.

    Attributes:
        config: of the run.
        data: config that its data is made with.
    """

    name: str
    config: TrainConfig
    data: TrainConfig

    @property
    def folder(self) -> Path:
        """Where the head is, once it is trained."""
        return Path(self.config.output_dir)

    @property
    def trained(self) -> bool:
        """Has the run met its limit, and left a head?"""
        found = checkpoint.latest(self.folder)
        if found is None or not (self.folder / DESCRIPTION).is_file():
            return False
        return Limits(self.config.schedule, found.state).reached(found.step) is not None


# -- variants ------------------------------------------------------------------------------------


def add_options(cli: argparse.ArgumentParser, output: str) -> None:
    """The options of every command that trains variants."""
    cli.add_argument("config", help="a YAML file, such as configs/hydra.yaml")
    cli.add_argument("overrides", nargs="*", metavar="key=value", help="for all variants")
    cli.add_argument("--variants", help="YAML file, a line each: NAME: {dotted.key: value}")
    cli.add_argument("--minutes", type=float, help="of training for each variant")
    cli.add_argument(
        "--jobs", type=int, default=1, help="trainings at once, each with a share of the cores"
    )
    cli.add_argument("--output", default=output, help="folder of all runs")


def given(options: argparse.Namespace) -> str:
    """The config and its overrides, as reports name them."""
    return " ".join([Path(options.config).name, *options.overrides])


def schedule(
    minutes: float | None, steps: int | None = None, option: str = "--minutes"
) -> list[str]:
    """Overrides for equal minutes or for equal steps.  Runs are judged by the head of their end:
    the best of several would favour those that come further.

    Args:
        option: what `minutes` was given as.
    Raises:
        InputError: neither, or a number that is none.
    """
    named = {option: minutes, "--steps": steps}
    bounds = {name: value for name, value in named.items() if value is not None}
    if not bounds:
        raise InputError(f"neither {option} nor --steps is given", f"Give {option}, above 0.")
    for name, value in bounds.items():
        if not value > 0:
            raise InputError(f"{name} is {value}", "Give more than 0.")
    ends = {"steps": steps or MANY, "minutes": "null" if minutes is None else minutes}
    found = ends | {"patience": "null", "eval_every": MANY}
    return [f"schedule.{name}={value}" for name, value in found.items()]


def kinds(options: argparse.Namespace, names: list[str], limits: list[str]) -> list[Variant]:
    """The config with a head of each kind."""
    base = load_config(options.config, options.overrides + limits)
    return [
        make_variant(kind, base, with_kind(base, kind), options) for kind in dict.fromkeys(names)
    ]


def with_kind(config: TrainConfig, kind: str) -> TrainConfig:
    """The config with a head of `kind`, of the same depth, taps, draft vocabulary and loss.

    Raises:
        InputError: no such kind.
    """
    if kind not in HEADS:
        raise InputError(f"--kinds {kind!r} is unknown", nearest(kind, HEADS))
    if kind == config.head.kind:
        return config
    shared = {name: getattr(config.head, name) for name in HeadConfig.model_fields}
    return config.model_copy(update={"head": HEADS[kind].Config(**(shared | {"kind": kind}))})


def read_variants(path: Path, reserved: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Names and what each sets: {dotted key: value}.

    Args:
        reserved: names that the report gives itself.
    Raises:
        InputError: no such file, another form, or a key that the command sets for all alike.
    """
    path = resolve_path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist", "Name a file: name -> {dotted key: value}.")
    named, problems = parse_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(named, dict) or not all(isinstance(v, dict) for v in named.values()):
        problems, named = problems or ["it is not name -> {dotted key: value}"], {}
    problems += [f"{n!r} is no name" for n in named if not re.fullmatch(r"[\w.-]+", str(n))]
    problems += [f"{n!r} is a row of the report already" for n in named if str(n) in reserved]
    problems += [
        f"{n!r} sets {key}, which is the same for all"
        for n, fields in named.items()
        for key in map(str, fields)
        if not OPEN.fullmatch(key) or key in {f"schedule.{name}" for name in SAME}
    ]
    if problems:
        raise InputError(
            f"{path}: {'; '.join(problems)}",
            "For example  tv: {head.loss: tv}  Keys of head, optim and schedule may be set, and "
            "data.temperatures, .pack, .bucket and .features.dtype.",
        )
    return {str(name): fields for name, fields in named.items()}


def overridden(
    options: argparse.Namespace, named: dict[str, dict[str, Any]], more: list[str]
) -> list[Variant]:
    """A variant for each of `named`, see `read_variants`.

    Args:
        more: overrides of all of them.
    """
    base, found = load_config(options.config, options.overrides), []
    for name, fields in named.items():
        own = [f"{key}={json.dumps(value)}" for key, value in fields.items()]
        config = load_config(options.config, options.overrides + own + more)
        found.append(make_variant(name, base, config, options))
    return found


def make_variant(
    name: str, base: TrainConfig, config: TrainConfig, options: argparse.Namespace
) -> Variant:
    """`config` in a folder of its own below --output, on the answers and in the features folder of
    `base`; another seed of a random target, which is another target, has answers of its own.

    Raises:
        InputError: nothing is held out, so that there is nothing to compare.
    """
    if not config.data.eval_prompts:
        raise InputError(
            f"{name} has data.eval_prompts 0", "Hold out some: trainings are compared by them."
        )
    output, seed = Path(options.output), base.seed
    # Below the base's folder, not one for each variant.
    fetched = fetch_named(base)
    file, prompts = base.answers_file, fetched.get("prompts", base.data.prompts)
    if config.target.random is not None and config.seed != seed:
        seed = config.seed
        file = file if prompts is None else output / f"answers-{seed}.jsonl"
    cache = config.data.features.model_copy(update={"folder": str(base.features_folder)})
    own = {"prompts": prompts, "file": str(file), "features": cache}
    data = config.data.model_copy(update=own)
    config = config.model_copy(update={"data": data, "resume": "latest"})
    kept: list[Any] = [config.model_dump(mode="json", exclude={"output_dir", "resume", "tracking"})]
    source = file if prompts is None else resolve_path(prompts)
    kept.append(sha256(source) if source.is_file() else None)
    if config.schedule.minutes is not None:
        kept.append(options.jobs)  # more at once come less far in their minutes
    folder = output / f"{name}-{_digest(kept)}"
    config = config.model_copy(update={"output_dir": str(folder)})
    return Variant(name, config, config.model_copy(update={"seed": seed}))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
