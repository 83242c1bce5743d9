"""What a run is built from: target, accelerator, head, optimizer."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from ..heads import Head, InputError, base
from ..heads.checkpoint import DESCRIPTION, check_target, read_description
from ..heads.losses import draft_index
from ..heads.vocab import coverage, draft_size, most_frequent
from ..inference.embeddings import TargetEnds
from ..inference.target import TargetModel
from . import zero_config
from .checkpoint import Checkpoint
from .config import OptimConfig, ScheduleConfig, TrainConfig
from .data import Documents, token_counts
from .engine import Engine, uses_deepspeed
from .features import FeatureSource
from .limits import measured_alike
from .packing import Document, digest
from .ranks import say, warn
from .reading import counted

START_ROWS = 64  # documents whose states say where an lm_head of low rank has to be right


def flush_subnormals() -> None:
    """Lets the whole process take numbers below float32's normal range for 0.  On an Intel CPU they
    make a step slower, with a mode-seeking loss up to three times; called before any threads of
    PyTorch start, which inherit it."""
    torch.set_flush_denormal(True)


def use_all_cores() -> None:
    """Undoes the one CPU thread that `accelerate launch` gives a lone process unless told."""
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ  # every launch sets it
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    cores = len(os.sched_getaffinity(0))
    if launched and alone and torch.get_num_threads() == 1 and cores > 1:
        torch.set_num_threads(cores)
        say(f"{cores} CPU threads; choose with accelerate's --num_cpu_threads_per_process")


def load_target(config: TrainConfig) -> TargetModel:
    """The target, on this process's own GPU where there are several.

    Raises:
        InputError: whatever is wrong with it; or one over all devices in each of several processes.
    """
    use_all_cores()
    fields = config.target.model_dump()
    local, processes = os.environ.get("LOCAL_RANK"), int(os.environ.get("WORLD_SIZE", 1))
    ends_alone = config.data.features.cache_only
    spread = fields["device_map"] is not None and not ends_alone
    if spread and processes > 1:
        raise InputError(
            f"target.device_map in {processes} processes, each of which would load the target",
            "Run scripts/prepare_data.py with data.features.cache_only=true, and train so too.",
        )
    own = local is not None and torch.cuda.is_available() and not spread
    if own and fields["device"] in ("auto", "cuda"):
        fields["device"] = f"cuda:{local}"
    say(f"target: {fields['model'] or 'random ' + str(fields['random'].get('model_type'))}")
    if ends_alone:
        return load_ends(config, fields["device"])
    return TargetModel.load(**fields, seed=config.seed)


def load_ends(config: TrainConfig, device: str) -> TargetModel:
    """The embedding and lm_head that scripts/prepare_data.py has put beside the feature cache."""
    named = config.target.model_dump(exclude={"device", "device_map", "dtype"})
    if config.target.dtype != "auto":
        named["dtype"] = config.target.dtype
    if config.target.random is not None:
        named["seed"] = config.seed
    return TargetEnds.read(config.ends_folder, device=device, **named)


def check_run_target(found: Checkpoint | None, target: TargetModel, config: TrainConfig) -> None:
    """Refuses to go on with, or to overwrite, heads of another target."""
    output = Path(config.output_dir)
    if found is not None:
        check_target(found.state["target"], target.spec.identity, found.folder)
        say(f"resuming {found.folder}")
        return
    if (output / DESCRIPTION).is_file():
        check_target(read_description(output)["target"], target.spec.identity, output)
    if config.resume == "latest":
        say(f"no whole checkpoint in {output}: starting from step 0")


def stream(config: TrainConfig, documents: Documents) -> dict[str, Any]:
    """What the order of rows in a run depends on."""
    rows = digest(documents.train)
    return {"rows": rows, "seed": config.seed, "data.bucket": config.data.bucket}


def check_run_stream(found: Checkpoint | None, met: dict[str, Any]) -> None:
    """Warns where a resumed run would go on in another stream of rows than its own."""
    trained = met if found is None else found.state.get("stream", met)
    differing = [name for name in met if met[name] != trained[name]]
    if found is not None and differing:
        warn(
            f"{found.folder} was trained with other {', '.join(differing)}: from here on the rows "
            f"are not those that the unbroken run would have seen"
        )


def check_run_measure(found: Checkpoint | None, schedule: ScheduleConfig, judged_by: str) -> None:
    """Warns where the evaluations so far were of another figure, or on other rows."""
    if found is None or measured_alike(schedule, found.state, judged_by):
        return
    before = found.state.get("select", schedule.select)
    if before != schedule.select:
        change = f"by {before}, schedule.select is now {schedule.select}: schedule.patience counts"
    else:
        change = "on other held-out rows: schedule.patience and the best head count"
    warn(f"{found.folder} was judged {change} from here")


def check_held_out(schedule: ScheduleConfig, documents: Documents) -> None:
    """Refuses what only held-out rows can decide where there are none."""
    if not documents.held_out and (schedule.patience is not None or schedule.select != "tau"):
        raise InputError(
            f"schedule.patience {schedule.patience} and schedule.select {schedule.select} go by "
            f"held-out rows, and none of the {len(documents.train)} rows is held out",
            "Raise data.eval_prompts or give more prompts (a quarter at most is held out), or leave"
            " patience and select out.",
        )


def make_accelerator(config: TrainConfig, target: TargetModel) -> Accelerator:
    """On the target's device; bf16 autocast over float32 weights but for float32 on a CPU.

    Raises:
        InputError: a way of launching that would be ignored or is not supported.
    """
    cpu, zero = target.spec.device.type == "cpu", uses_deepspeed()
    if cpu and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise InputError(
            "FSDP is asked for and the target is on a CPU, where accelerate would ignore it",
            "Launch with torchrun (DDP) or configs/accelerate/zero2_cpu.yaml.",
        )
    plain = cpu and target.spec.dtype in (torch.float32, torch.float64)
    backend = [InitProcessGroupKwargs(backend="gloo")] if cpu and zero else []
    if cpu and zero:
        zero_config.compile_nothing()
    tracker = config.tracking.tracker
    try:
        accelerator = Accelerator(
            cpu=cpu and not zero,  # which would drop the DeepSpeed config without a word
            mixed_precision="no" if plain or zero else "bf16",
            log_with=None if tracker == "none" else tracker,
            project_dir=config.output_dir,
            kwargs_handlers=backend,
        )
    except ValueError as error:
        if not zero:
            raise
        raise InputError(
            f"accelerate refuses the DeepSpeed config: {error}", zero_config.ADVICE
        ) from None
    if zero:
        zero_config.set_up(accelerator, config, autocast=not plain)
    return accelerator


def describe(documents: Documents) -> str:
    """One line about the data."""
    parts = [f"{len(documents.train)} rows to train on, {len(documents.held_out)} held out"]
    if len(documents.eval) < len(documents.held_out):
        parts[0] += f", tau is measured on the {len(documents.eval)} greedy ones"
    if documents.held_out and not documents.drawn:
        parts[0] += ", none drawn at temperature 1: tau there is an estimate"
    if documents.unused:
        parts.append(f"{len(documents.unused)} left out by data.temperatures")
    if documents.cut:
        parts.append(f"{documents.cut} cut to data.max_length")
    if documents.turns:
        parts.append(f"assistant turns out of the loss: {counted(documents.turns)}")
    if documents.skipped:
        parts.append(f"skipped: {counted(documents.skipped)}")
    return f"data: {'; '.join(parts)}"


def build_head(
    config: TrainConfig,
    target: TargetModel,
    documents: list[Document],
    found: Checkpoint | None = None,
) -> Head:
    """A new head, its parameters drawn from the run's seed; its draft vocabulary is that of
    `found`, whatever the documents have become.

    Raises:
        InputError: sizes for which there is no memory.
    """
    spec, draft_ids = target.spec, None
    counts_V = token_counts(documents, spec.vocab_size)
    if found is not None:
        draft_ids = found.weights().get("draft_ids")
    else:
        size = draft_size(counts_V, config.head.draft_vocab, config.head.draft_coverage)
        draft_ids = most_frequent(counts_V, size) if size < spec.vocab_size else None
    if draft_ids is not None:
        size, share = len(draft_ids), coverage(counts_V, draft_ids)
        say(f"draft vocabulary: {size} of {spec.vocab_size} ids, {share:.1%} of the answers")
    set_seed(config.seed)
    advice = "Make head.width, head.layers or head.depth smaller."
    head = base.build_head(config.head, spec, draft_ids, advice)
    head.init_from_target(target.weights)
    say(f"head: {head.kind}, {sum(p.numel() for p in head.parameters()):,} parameters")
    return head


def start_from_data(
    head: Head, target: TargetModel, documents: list[Document], features: FeatureSource
) -> None:
    """Starts a new head's prior from the data's bigrams, and an lm_head of low rank from the
    target's and its states."""
    if head.prior is not None:
        head.prior.init_from(*bigrams(documents, head.draft_ids))
    if head.low_rank is not None:
        hidden = [features.get([d])["hidden"].flatten(0, 1) for d in documents[:START_ROWS]]
        head.low_rank.init_from(target.weights.lm_head(head.draft_ids), torch.cat(hidden))


def bigrams(documents: list[Document], draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """[P, 2] the distinct pairs of an id and the index in `draft_ids` of a loss token after it, and
    [P] how often each is met."""
    counts = Counter(
        pair
        for d in documents
        for pair, learned in zip(pairwise(d.ids), d.loss_mask[1:], strict=True)
        if learned
    )
    pairs_P2 = torch.tensor(list(counts), dtype=torch.int64).view(-1, 2)
    pairs_P2[:, 1] = draft_index(pairs_P2[:, 1].contiguous(), draft_ids)
    known_P = pairs_P2[:, 1] >= 0
    return pairs_P2[known_P], torch.tensor(list(counts.values()), dtype=torch.int64)[known_P]


def accumulation(config: TrainConfig, processes: int, found: Checkpoint | None) -> int:
    """Micro-batches a step; a resumed run keeps its global batch on any number of processes."""
    rows = processes * config.schedule.batch_size
    if found is None:
        return config.schedule.accumulate
    kept = found.state["global_batch"]
    if kept % rows:
        raise InputError(
            f"{found.folder} was trained on {kept} rows a step, which {processes} process(es) "
            f"with schedule.batch_size {config.schedule.batch_size} cannot share",
            f"Choose a number of processes and a batch_size whose product divides {kept}.",
        )
    if kept // rows != config.schedule.accumulate:
        say(f"accumulate is {kept // rows}, to keep {kept} rows a step")
    return kept // rows


def build_optimizer(head: Head, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the head's parameters and no others."""
    return torch.optim.AdamW(head.parameters(), **_adamw(config))


def restore_optimizer(engine: Engine, config: OptimConfig, found: Checkpoint) -> None:
    """Takes up the moments of `found`; the settings stay those of the config."""
    engine.load_moments(found.optimizer(), **_adamw(config))


def _adamw(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
