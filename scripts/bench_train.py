"""Times training steps of each head kind against the usual loop, on the rows of a config.

python scripts/bench_train.py configs/quickstart.yaml [--kinds hydra,medusa] [--json OUT]

`cached` trains on the features on disk, `online` runs the target in every step.  `yardstick` is the
loop that heads are usually trained with: the frozen target (packed, no_grad) in every step, K heads
with a full-vocabulary output each (Medusa-1, arXiv 2401.10774), cross-entropy in chunks, AdamW; the
same batches and rows.  Each figure comes from a process of its own, so that memory is not shared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from selfdraft.heads import HEADS
from selfdraft.heads.errors import InputError, exit_code
from selfdraft.heads.layers import ResidualBlock
from selfdraft.heads.losses import loss_rows
from selfdraft.heads.objectives import CHUNK
from selfdraft.inference.target import TargetModel
from selfdraft.scripts.bench_report import conditions, write
from selfdraft.scripts.experiments import with_kind
from selfdraft.train import setup
from selfdraft.train.config import TrainConfig, load_config
from selfdraft.train.data import check_data, load_documents
from selfdraft.train.distill import open_features
from selfdraft.train.engine import make_engine
from selfdraft.train.evaluate import to_device
from selfdraft.train.features import FeatureSource, OnlineFeatures
from selfdraft.train.packing import Document, collate
from selfdraft.train.step import Batches, Stepper

WARMUP = 2  # steps that are not timed: first calls allocate
MODES = ("cached", "online", "yardstick")
Step = Callable[[list[Document], list[Document], int], None]
"""(rows, those of the next step, number of the step)."""


class Timed(FeatureSource):
    """A feature source; the time that training waits for it is measured."""

    def __init__(self, source: FeatureSource) -> None:
        super().__init__(source.target, source.pack)
        self.source, self.seconds = source, 0.0

    def get(self, documents: list[Document]) -> Any:
        """See `FeatureSource.get`."""
        start = time.perf_counter()
        try:
            return self.source.get(documents)
        finally:
            self.seconds += time.perf_counter() - start

    def expect(self, documents: list[Document]) -> None:
        """See `FeatureSource.expect`."""
        self.source.expect(documents)


def our_step(config: TrainConfig, target: TargetModel, mode: str) -> tuple[Step, Timed]:
    """A step of the trainer, one process."""
    documents = load_documents(config, target)
    accelerator = setup.make_accelerator(config, target)
    head = setup.build_head(config, target, documents.train)
    if mode == "online":
        source: FeatureSource = OnlineFeatures(target, head.taps, config.data.features.dtype)
    else:
        source = open_features(config, target, documents, head.taps)
    features = Timed(source)
    optimizer = setup.build_optimizer(head, config.optim)
    stepper = Stepper(make_engine(accelerator, head, optimizer, config.optim.clip), features)

    def step(rows: list[Document], following: list[Document], number: int) -> None:
        stepper([rows], number, config.optim.lr, following)

    return step, features


class Yardstick(nn.Module):
    """K residual blocks on the last state, each with an output layer over the whole vocabulary."""

    def __init__(self, target: TargetModel, depth: int) -> None:
        super().__init__()
        self.target, width = [target], target.spec.hidden_size
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        rows = target.weights.lm_head(None).float()
        self.outputs = nn.ParameterList(nn.Parameter(rows.clone()) for _ in range(depth))
        self.to(target.device)

    def backward(self, rows: list[Document]) -> None:
        """Forward and backward of a batch; logits live for one chunk."""
        target, depth = self.target[0], len(self.blocks)
        batch = to_device(collate(rows), target.device)
        with torch.no_grad():
            hidden = target.features(batch["ids"], batch["length"], [])["hidden"].flatten(0, 1)
        ids = batch["ids"].flatten()
        for k, index in enumerate(loss_rows(batch, depth), start=1):
            for part in index.split(max(1, CHUNK // target.spec.vocab_size)):
                state = self.blocks[k - 1](hidden[part].float())
                logits = nn.functional.linear(state, self.outputs[k - 1])
                labels = ids[part + 1 + k]
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                (loss / len(index)).backward()


def yardstick_step(config: TrainConfig, target: TargetModel) -> tuple[Step, Timed]:
    """A step of the usual loop."""
    heads = Yardstick(target, config.head.depth)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=config.optim.lr)
    dtype, device = torch.bfloat16, target.device.type
    autocast = torch.autocast(device, dtype, enabled=target.dtype == dtype)

    def step(rows: list[Document], following: list[Document], number: int) -> None:
        with autocast:
            heads.backward(rows)
        nn.utils.clip_grad_norm_(heads.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, Timed(OnlineFeatures(target, [], "float32"))


def measure(config: TrainConfig, mode: str, steps: int) -> dict[str, Any]:
    """One figure: `steps` steps after the warm-up."""
    check_data(config)
    target = setup.load_target(config)
    if mode == "yardstick":
        step, features = yardstick_step(config, target)
    else:
        step, features = our_step(config, target, mode)
    documents = load_documents(config, target).train
    batches = Batches(documents, config.seed, config.schedule.batch_size, 1, 1)
    stream: Iterator[tuple[int, list[Document]]] = (
        (number, batches.rows(number)) for number in range(WARMUP + steps)
    )
    for number, rows in stream:
        if number == WARMUP:
            _synchronize(target)
            tokens, features.seconds, begin = 0, 0.0, time.perf_counter()
            _forget_peak()
        step(rows, batches.rows(number + 1), number + 1)
        if number >= WARMUP:
            tokens += sum(len(row.ids) for row in rows)
    _synchronize(target)
    seconds = time.perf_counter() - begin
    facts = conditions(target, steps=steps, batch_size=config.schedule.batch_size)
    return {
        "name": "yardstick" if mode == "yardstick" else f"{config.head.kind} {mode}",
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds / steps,
        "features_share": features.seconds / seconds,
        "peak_memory_gb": _peak_gb(),
        "conditions": facts | {"sampling": "training steps"},
    }


def _synchronize(target: TargetModel) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak() -> None:
    """The peak counts from here: loading takes more than training does."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def _peak_gb() -> float:
    """Peak memory since `_forget_peak`: allocated on the GPU, or resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def in_a_process(options: argparse.Namespace, kind: str, mode: str) -> dict[str, Any]:
    """`measure` in a child, so that its memory is its own."""
    command = [sys.executable, __file__, options.config, *options.overrides]
    command += ["--kinds", kind, "--mode", mode, "--steps", str(options.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(f"measuring {kind} {mode} failed", "Its own message is above.")
    return json.loads(done.stdout.splitlines()[-1])


def run(options: argparse.Namespace) -> int:
    """Measures everything that is asked for and prints it; one figure alone is printed as JSON."""
    config = load_config(options.config, options.overrides)
    kinds = options.kinds.split(",") if options.kinds else sorted(HEADS)
    configs = [with_kind(config, kind) for kind in kinds]
    if options.steps < 1:
        raise InputError(f"--steps {options.steps}", "Time one step or more.")
    if options.mode:
        print(json.dumps(measure(configs[0], options.mode, options.steps)))
        return 0
    rows = [in_a_process(options, config.head.kind, "yardstick")]
    for kind in kinds:
        rows += [in_a_process(options, kind, mode) for mode in ("cached", "online")]
    facts = rows[0]["conditions"]
    facts.pop("peak_memory_gb")
    for row in rows:
        del row["conditions"]
        row["vs_yardstick"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    report = {"conditions": facts, "rows": rows}
    show(report)
    write(report, options.json)
    return 0


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    columns = ("loop", "tokens/s", "x yardstick", "s a step", "features", "peak GB")
    table = Table(title="training steps, one process")
    for column in columns:
        table.add_column(column, justify="left" if column == "loop" else "right")
    for row in report["rows"]:
        figures = [f"{row['tokens_per_second']:.0f}", f"{row['vs_yardstick']:.1f}"]
        figures += [f"{row['seconds_per_step']:.3f}", f"{row['features_share']:.0%}"]
        table.add_row(row["name"], *figures, f"{row['peak_memory_gb']:.2f}")
    Console(width=100).print(table)


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="bench_train.py", description=__doc__.splitlines()[0])
    cli.add_argument("config", help="a YAML file whose data is prepared")
    cli.add_argument("overrides", nargs="*", metavar="key=value")
    cli.add_argument("--kinds", help="head kinds, comma separated; all if unset")
    cli.add_argument("--mode", choices=MODES, help="one figure of the first kind, as JSON")
    cli.add_argument("--steps", type=int, default=8)
    cli.add_argument("--json", help="write the report here")
    options = cli.parse_intermixed_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    setup.flush_subnormals()  # as train.py does
    raise SystemExit(main())
