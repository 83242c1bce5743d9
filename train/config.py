"""The config of a run: strict models, YAML in which 2e-5 is a number, dotted overrides.

Everything that is wrong is reported at once and before a model loads.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from ..heads import HEADS, HeadConfig
from ..heads.errors import InputError, nearest
from .hub import is_hub, shard
from .overrides import apply_overrides, parse_yaml
from .sections import DataConfig, Section, UserPath

PACKAGE = Path(__file__).resolve().parent.parent


class ConfigError(InputError):
    """A config that cannot be used: a line for each problem, and what to do."""


def _device_map(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    devices = value.values() if isinstance(value, dict) else []
    if not devices or any(type(device) not in (int, str) for device in devices):
        raise ValueError("auto is wanted, or a mapping of modules to devices (0, cpu, disk)")
    return {str(module): device for module, device in value.items()}


class TargetConfig(Section):
    """The frozen model.

    Attributes:
        model: hub id, local folder or package://NAME.
        device_map: spreads a model that no single device holds over devices, memory and disk:
            `auto`, or a device by module name, as transformers takes it.
        random: instead of `model`, a transformers config that is initialised from the run's seed.
    """

    model: UserPath | None = None
    gguf_file: str | None = None
    revision: str | None = None
    adapter: UserPath | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: Annotated[Any, BeforeValidator(_device_map)] = None
    random: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.random is None):
            raise ValueError("give exactly one of model and random")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW; `clip` bounds the gradient's norm."""

    lr: float = Field(default=1e-3, gt=0)
    betas: list[Beta] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)


class ScheduleConfig(Section):
    """Attributes:
    steps: optimizer steps at most.
    minutes: wall time of training steps at most, over all resumptions; evaluation, checkpoints and
        features do not count.  None for no bound.
    patience: evaluations in a row without gain that end the run; None for no such end.
    select: held-out figure by which the best head is kept: tau at temperature 0, at 1, the mean of
        both, or tau of real decoding (of tracking.samples prompts, at each evaluation).
    warmup: steps of linear warm-up, before the cosine.
    batch_size: rows a process a micro-step.
    accumulate: micro-steps a step.
    eval_every, save_every: steps.
    keep_last: checkpoints kept; -1 keeps all.
    """

    steps: int = Field(ge=1)
    minutes: float | None = Field(default=None, gt=0)
    patience: int | None = Field(default=None, ge=1)
    select: Literal["tau", "tau_t1", "mean", "decoded"] = "tau"
    warmup: int = Field(default=0, ge=0)
    batch_size: int = Field(default=8, ge=1)
    accumulate: int = Field(default=1, ge=1)
    eval_every: int = Field(default=100, ge=1)
    save_every: int = Field(default=100, ge=1)
    keep_last: int = Field(default=2, ge=-1)


class TrackingConfig(Section):
    """Attributes:
    project, name, mode: of W&B; mode auto is online with an API key, else offline.
    samples: held-out prompts that are answered with the head: for a tracker whenever it has become
        better, for schedule.select decoded at each evaluation.
    sample_tokens: new tokens of each.
    """

    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    project: str = "selfdraft"
    name: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    samples: int = Field(default=4, ge=0)
    sample_tokens: int = Field(default=48, ge=1)


def _head_config(value: Any) -> HeadConfig:
    """The config of the kind that `value` names; its errors keep their place below `head`."""
    if isinstance(value, HeadConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError("a section with `kind` is wanted")
    kind = value.get("kind")
    if isinstance(kind, str) and kind in HEADS:
        return HEADS[kind].Config.model_validate(value)
    problem = PydanticCustomError(
        "kind", "no head kind. {hint}", {"hint": nearest(str(kind), HEADS)}
    )
    detail = InitErrorDetails(type=problem, loc=("kind",), input=kind)
    raise ValidationError.from_exception_data("head", [detail])


class TrainConfig(Section):
    """A whole run.

    Attributes:
        output_dir: the best head's folder, with config.yaml, metrics.jsonl and checkpoints below.
        seed: of every random decision.
        resume: none, latest (starts fresh in an empty folder) or a checkpoint folder.
    """

    target: TargetConfig
    head: Annotated[SerializeAsAny[HeadConfig], BeforeValidator(_head_config)]
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig
    tracking: TrackingConfig = TrackingConfig()
    output_dir: UserPath = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
    resume: UserPath = "none"

    @model_validator(mode="after")
    def _judged_by_something(self) -> Self:
        by_rows = self.schedule.patience is not None or self.schedule.select != "tau"
        if by_rows and not self.data.eval_prompts:
            raise ValueError(
                "schedule.patience and schedule.select go by held-out rows, data.eval_prompts is 0"
            )
        return self

    @model_validator(mode="after")
    def _can_decode(self) -> Self:
        if self.schedule.select == "decoded":
            if not self.tracking.samples:
                raise ValueError("schedule.select decoded needs prompts, tracking.samples is 0")
            if self.tracking.sample_tokens < 3:  # of the prefill, of a draft, and behind it
                raise ValueError("schedule.select decoded needs tracking.sample_tokens 3 or more")
            if self.data.features.cache_only:
                raise ValueError("schedule.select decoded needs the whole target, not cache_only")
        return self

    @property
    def answers_file(self) -> Path:
        """The file that is trained on."""
        if self.data.file is not None:
            return self.local_file(self.data.file)
        return Path(self.output_dir) / "answers.jsonl"

    def local_file(self, name: str) -> Path:
        """Where a file of the config lies, or a hub dataset once it is fetched."""
        if is_hub(name):
            return shard(name, Path(self.output_dir), self.data.limit)
        return resolve_path(name)

    @property
    def features_folder(self) -> Path:
        """Where the target's hidden states are cached."""
        folder = self.data.features.folder
        return Path(self.output_dir) / "features" if folder is None else resolve_path(folder)

    @property
    def ends_folder(self) -> Path:
        """Where the target's embedding and lm_head lie with `data.features.cache_only`."""
        return self.features_folder / "target"


def resolve_path(path: str | Path) -> Path:
    """`path` from the working directory or, where it is missing there, from the package."""
    here, shipped = Path(path), PACKAGE / path
    return shipped if not here.exists() and shipped.exists() else here


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Reads a YAML file and applies overrides.

    Args:
        overrides: `a.b=value`, with values read as YAML.  `head.kind=NAME` first resets `head` to
            that kind's defaults and prints the keys of the file that this drops.
    Raises:
        ConfigError: with all problems.
    """
    raw, problems = _read_yaml(resolve_path(path))
    problems += apply_overrides(raw, overrides or [])
    raw = {key: value for key, value in raw.items() if value is not None}
    try:
        config = TrainConfig.model_validate(raw)
    except ValidationError as error:
        kind = raw["head"].get("kind") if isinstance(raw.get("head"), dict) else None
        kind = kind if isinstance(kind, str) else None
        problems += [_describe(e, kind) for e in error.errors(include_url=False)]
    if problems:
        raise ConfigError(
            f"{path}: {problems[0]}"
            if len(problems) == 1
            else f"{path}: {len(problems)} problems\n  " + "\n  ".join(problems),
            "Correct the file or the overrides; nothing has been loaded yet.",
        )
    return config


def _read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        shipped = [f"configs/{p.name}" for p in (PACKAGE / "configs").glob("*.yaml")]
        reason = "does not exist" if not path.exists() else f"cannot be read: {error}"
        raise ConfigError(f"{path} {reason}", nearest(str(path), shipped)) from None
    raw, problems = parse_yaml(text)
    if not isinstance(raw, dict):
        problems = problems or ["holds no sections"]
        raise ConfigError(f"{path}: {problems[0]}", "See configs/quickstart.yaml for the form.")
    return raw, problems


def _describe(error: ErrorDetails, kind: Any) -> str:
    """One problem in one line: the dotted path, the value met, what is wanted."""
    if not error["loc"]:  # of several sections together
        return error["msg"].removeprefix("Value error, ")
    *parents, name = error["loc"]
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{path}: missing"
    met = reprlib.repr(error["input"])
    if error["type"] != "extra_forbidden":
        return f"{path} = {met}: {error['msg'].removeprefix('Value error, ')}"
    known = _known_keys(parents, kind)
    elsewhere = [s for s in TrainConfig.model_fields if name in _known_keys([s], kind)]
    if elsewhere and name not in known:
        return f"{path} = {met}: unknown key. Did you mean '{elsewhere[0]}.{name}'?"
    return f"{path} = {met}: unknown key. {nearest(str(name), known)}"


def _known_keys(parents: list[int | str], kind: Any) -> set[str]:
    """Keys of the section at `parents`; none where it is no section."""
    model: type[BaseModel] = TrainConfig
    for part in parents:
        if part == "head":
            model = HEADS[kind].Config if kind in HEADS else HeadConfig
        elif isinstance(part, str):
            annotation = model.model_fields[part].annotation
            found = [t for t in (annotation, *get_args(annotation)) if _is_section(t)]
            if not found:
                return set()
            model = found[0]
    return set(model.model_fields)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
