"""A training run: config in, trained heads in output_dir out.

Only the head is wrapped by accelerate.  The target is built before the Accelerator, since a
DeepSpeed plugin would empty models that load after it.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from tqdm.auto import tqdm

from ..heads import InputError, save_head
from ..heads.checkpoint import replace_file
from ..inference.target import TargetModel
from . import checkpoint as checkpoints
from . import setup
from .answers import check_answers
from .checkpoint import Checkpoint
from .config import TrainConfig
from .data import Documents, check_data, load_documents
from .distill import open_features
from .earlier import best_head, finished, named
from .engine import make_engine
from .evaluate import TAUS, described, measure
from .limits import Limits, judged_by, score
from .locks import locked
from .ranks import is_main, say
from .samples import decoded_tau, make_samples
from .signals import caught_signals
from .step import Batches, Stepper, learning_rate
from .tracking import MetricsFile, check_tracker, finite, make_tracker


@dataclass(frozen=True)
class Result:
    """What a run came to: optimizer steps done, and the best held-out tau (None: not evaluated)."""

    step: int
    tau: float | None


def run(config: TrainConfig) -> Result:
    """Trains as the config says, or goes on with an earlier run.

    Raises:
        InputError: whatever is wrong with config, data, target or checkpoint, as early as it can
            be seen, or another run at work in output_dir.
        SystemExit: 128 + n after signal n, with a checkpoint saved.
    """
    alone = locked(Path(config.output_dir), "Choose another output_dir.")
    with alone if is_main() else nullcontext():
        return _run(config)


def _run(config: TrainConfig) -> Result:
    found = checkpoints.find_resume(config)
    if found is not None and finished(found, config):
        return Result(found.step, best_head(config.output_dir).get("tau"))
    check_tracker(config.tracking)
    check_data(config)
    target = setup.load_target(config)
    setup.check_run_target(found, target, config)
    accelerator = setup.make_accelerator(config, target)
    check_answers(config, target)
    documents = load_documents(config, target)
    setup.check_held_out(config.schedule, documents)
    say(setup.describe(documents))
    return Trainer(config, accelerator, target, documents, found).train()


class Trainer:
    """The loop, and what it keeps between steps."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: TargetModel,
        documents: Documents,
        found: Checkpoint | None,
    ) -> None:
        self.config, self.accelerator, self.documents = config, accelerator, documents
        self.target = target
        self.step, self.output = 0 if found is None else found.step, Path(config.output_dir)
        self.stream = setup.stream(config, documents)
        setup.check_run_stream(found, self.stream)
        self.judged_by = judged_by(config, documents)
        setup.check_run_measure(found, config.schedule, self.judged_by)
        self.module = setup.build_head(config, target, documents.train, found)
        self.features = open_features(config, target, documents, self.module.taps)
        if found is None:
            setup.start_from_data(self.module, target, documents.train, self.features)
        else:
            self.module.load_state_dict(found.weights())
        optimizer = setup.build_optimizer(self.module, config.optim)
        self.engine = make_engine(accelerator, self.module, optimizer, config.optim.clip)
        self.batches = Batches(
            documents.train,
            config.seed,
            config.schedule.batch_size,
            setup.accumulation(config, accelerator.num_processes, found),
            accelerator.num_processes,
            config.data.bucket,
        )
        self.stepper = Stepper(self.engine, self.features)
        best = best_head(self.output, found, self.judged_by)
        self.tau, self.best = best.get("tau"), score(best, config.schedule)
        state = found.state if found else {}
        self.limits = Limits(config.schedule, state, self.judged_by)
        # A run that goes on elsewhere is another one.
        ours = found is not None and found.lies_in(self.output)
        run_id = state.get("tracker_id") if ours else None
        self.tracker = make_tracker(accelerator, config, run_id)
        if is_main():
            (self.output / checkpoints.FOLDER).mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            replace_file(self.output / "config.yaml", lambda to: Path(to).write_text(text))
            self.metrics = MetricsFile(self.output, self.step)
        self.tracker.start(self.step)
        self._restore(found)

    def _restore(self, found: Checkpoint | None) -> None:
        """Optimizer and random numbers; comes last, so that nothing draws in between."""
        set_seed(self.config.seed, device_specific=True)
        if found is None:
            return
        setup.restore_optimizer(self.engine, self.config.optim, found)
        states = found.random_states()
        if self.accelerator.process_index < len(states):
            checkpoints.set_random_state(states[self.accelerator.process_index])

    def train(self) -> Result:
        """Runs to the first limit of `schedule`.

        Raises:
            SystemExit: a signal came; the step it came in is saved.
        """
        schedule = self.config.schedule
        bar = tqdm(
            total=None if schedule.minutes else schedule.steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=not is_main(),
        )
        try:
            with bar, caught_signals() as received:
                while not self.limits.reached(self.step):
                    started = time.perf_counter()
                    bar.set_postfix(self._one_step())
                    bar.update()
                    stop = self._agree(received, time.perf_counter() - started)
                    last = self.limits.reached(self.step)
                    if last or self.step % schedule.eval_every == 0:
                        self._evaluate()
                        last = self.limits.reached(self.step)
                    due = self.step % schedule.save_every == 0 and not self.stepper.skipped
                    if last or stop or due:
                        self._save()
                    if stop and not last:
                        name = signal.Signals(stop).name
                        say(f"{name}: step {self.step} is saved, resume=latest goes on from there")
                        raise SystemExit(128 + stop)
            if is_main():
                self.tracker.log_head(self.output)
        finally:
            self.tracker.finish()
        say(f"done: {self.step} steps, best head in {self.output}")
        return Result(self.step, self.tau)

    def _one_step(self) -> dict[str, str]:
        """Takes the next step and reports it; returns what the progress bar shows."""
        config, started = self.config, time.perf_counter()
        steps, warmup = config.schedule.steps, config.schedule.warmup
        lr = learning_rate(self.step, steps, warmup, config.optim.lr, self.limits.spent)
        rank = self.accelerator.process_index
        micro, following = (self.batches.micro(s, rank) for s in (self.step, self.step + 1))
        fine = self.stepper(micro, self.step + 1, lr, following[0])
        rows = self.batches.rows(self.step)
        self.step += 1
        means = self.stepper.tally.means(self.module.loss_weights())
        tokens = sum(sum(row.loss_mask) for row in rows)
        speed = tokens / (time.perf_counter() - started)
        self._report(
            {
                "step": self.step,
                "lr": lr,
                "loss": means["loss"],
                "loss_k": means["loss_k"],
                "top1_k": means["top1"],
                "acceptance_k": means["tau_by_depth"],
                "tau": means["tau"],
                "grad_norm": self.stepper.grad_norm,
                "skipped": not fine,
                "tokens": tokens,
                "tokens_per_second": round(speed, 1),
                "rows": [row.row for row in rows],
            }
        )
        return {
            "loss": f"{means['loss']:.3f}",
            "tau": f"{means['tau']:.3f}",
            "tok/s": f"{speed:.0f}",
        }

    def _evaluate(self) -> None:
        """Measures held-out tau, and keeps the head where it is the best so far.  With nothing
        held out the last head is kept."""
        found, shown = {}, (self.documents.eval, self.config.tracking)
        weights = self._weights() if self.config.schedule.select == "decoded" else {}
        if self.documents.eval:
            found = measure(
                self.module,
                self.documents,
                self.features,
                self.config.schedule.batch_size,
                self.accelerator,
                self.engine.autocast,
            )
            if weights:
                found["tau_decoded"] = decoded_tau(weights, self.module, self.target, *shown)
            self._report({"step": self.step, "eval": found})
            say(f"step {self.step}: held-out {described(found)}")
            now = score(found, self.config.schedule)
            assert now is not None
            self.limits.scores.append(now)
            if self.best is not None and now <= self.best:
                return
            self.best, self.tau = now, found["tau"]
        weights = weights or self._weights()
        if is_main():
            notes = {name: finite(found.get(name)) for name in (*TAUS, "tau_decoded", "sharpness")}
            notes |= {"step": self.step, "judged_by": self.judged_by}
            notes["trained_length"] = max(len(d.ids) for d in self.documents.train)
            save_head(self.output, self.module, weights, **notes)
            samples = partial(make_samples, self.output, self.target, *shown)
            self.tracker.log_samples(self.step, samples)

    def _weights(self) -> dict[str, Tensor]:
        """The head's state dict; every process must ask for it.

        Raises:
            InputError: it is not finite, so it must not be written.
        """
        weights = self.engine.weights()
        bad = [name for name, t in weights.items() if not t.isfinite().all()]
        if bad:
            raise InputError(
                f"after step {self.step} the {self.module.kind} head is not finite: {bad[0]}",
                "Lower optim.lr and pass resume=latest; nothing of this step was written.",
            )
        return weights

    def _report(self, line: dict[str, Any]) -> None:
        if is_main():
            self.metrics.write(line)
            self.tracker.log({key: value for key, value in line.items() if key != "rows"})

    def _save(self) -> None:
        """Writes checkpoints/step-N; all processes take part."""
        states = gather_object([checkpoints.random_state()])
        weights, moments = self._weights(), self.engine.moments()
        if is_main():
            head = {"kind": self.module.kind, "config": self.module.config.model_dump(mode="json")}
            state = {
                "step": self.step,
                "global_batch": self.batches.size,
                "stream": self.stream,
                "tau": self.tau,
                "tracker_id": self.tracker.run_id,
                "head": head,
                "target": self.module.spec.identity,
                "target_config": named(self.config),
                **self.limits.state(),
            }
            checkpoints.save(self.output, weights, moments, states, state)
            if not self.stepper.skipped:  # what was before a step that went wrong stays
                checkpoints.prune(self.output, self.config.schedule.keep_last)
        self.accelerator.wait_for_everyone()

    def _agree(self, received: list[int], seconds: float) -> int:
        """Adds up the time of a step, that of the slowest process; the highest signal that any
        process received, 0 for none."""
        mine = [float(max(received, default=0)), seconds]
        both = torch.tensor(mine, dtype=torch.float64, device=self.accelerator.device)
        stop, slowest = self.accelerator.reduce(both, "max").tolist()
        self.limits.seconds += slowest
        return int(stop)
