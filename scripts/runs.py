"""The trainings of a comparison: their data, and each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.scripts.experiments import Variant
from selfdraft.scripts.prepare_data import prepare
from selfdraft.train.config import PACKAGE, TrainConfig
from selfdraft.train.data import load_documents
from selfdraft.train.distill import open_features
from selfdraft.train.locks import locked
from selfdraft.train.recording import layers_read
from selfdraft.train.signals import caught_signals

POLL = 0.2
"""Seconds between looks at the trainings that run."""
Running = tuple[Variant, subprocess.Popen[bytes]]


@contextmanager
def workplace(output: Path) -> Iterator[int]:
    """Keeps `output` to one command and the trainings that it has started, and lets SIGTERM end
    them too.  Yields what a child must inherit.

    Raises:
        InputError: another command, or a training that it left, is at work there.
    """
    with locked(output, "Give another --output.") as lock:
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield lock
        finally:
            signal.signal(signal.SIGTERM, previous)


def train_all(variants: list[Variant], lock: int, jobs: int = 1) -> None:
    """Makes the data that is missing and trains what is not trained, each in its own process.

    Args:
        lock: what the processes inherit, see `workplace`.
        jobs: how many train at once.
    Raises:
        InputError: one of them failed, or `jobs` is no such number.
    """
    if jobs < 1:
        raise InputError(f"--jobs is {jobs}", "Give 1 or more.")
    todo = [variant for variant in variants if not variant.trained]
    for home in dict.fromkeys(_home(variant.data) for variant in todo):
        make_data([variant.data for variant in todo if _home(variant.data) == home])
    print(f"{len(variants) - len(todo)} of {len(variants)} trainings are there")
    running: list[Running] = []
    with caught_signals() as received:
        try:
            for number, variant in enumerate(todo, start=1):
                _wait(running, jobs - 1, received)
                shown = f"{variant.name}, seed {variant.config.seed}"
                print(f"[{number}/{len(todo)}] {shown}: training", flush=True)
                running.append((variant, start(variant, lock, jobs)))
            _wait(running, 0, received)
        finally:  # each child saves its step before it ends
            for _, child in running:
                child.terminate()
            for _, child in running:
                child.wait()


def _home(config: TrainConfig) -> tuple[Path, str, int]:
    """What variants share whose data is the same; a random target is another with each seed."""
    return config.answers_file, config.data.features.dtype, config.seed


def make_data(configs: list[TrainConfig]) -> None:
    """The answers of configs that share their data, and one feature cache with all their taps."""
    prepare(configs[0], configs[1:])
    target = TargetModel.load(**configs[0].target.model_dump(), seed=configs[0].seed)
    documents = load_documents(configs[0], target)
    if not documents.held_out:
        raise InputError(
            f"{configs[0].answers_file} leaves no prompt to hold out", "Give more prompts."
        )
    if configs[0].data.features.cache:
        open_features(configs[0], target, documents, layers_read(configs, target))
    if target.device.type == "cuda":  # the trainings want the memory
        del target, documents
        torch.cuda.empty_cache()


def start(variant: Variant, lock: int, jobs: int) -> subprocess.Popen[bytes]:
    """A training in a process of its own, which goes on where an earlier one was ended."""
    path = _config_file(variant)
    path.write_text(yaml.safe_dump(variant.config.model_dump(mode="json"), sort_keys=False))
    command = [sys.executable, str(PACKAGE / "train.py"), str(path)]
    share = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs))}
    return subprocess.Popen(command, pass_fds=[lock], env=os.environ | share)


def _config_file(variant: Variant) -> Path:
    return variant.folder.with_name(f"{variant.folder.name}.yaml")


def _wait(running: list[Running], most: int, received: list[int]) -> None:
    """Waits until at most so many trainings run, and takes those out that have ended.

    Raises:
        InputError: one ended with another exit code than 0.
        SystemExit: a signal came.
    """
    while True:
        if received:
            raise SystemExit(128 + received[0])
        for variant, child in [pair for pair in running if pair[1].poll() is not None]:
            running.remove((variant, child))
            if child.returncode or not variant.trained:
                raise InputError(
                    f"training {variant.name} ended with exit code {child.returncode}",
                    f"Its own message is above; its config is {_config_file(variant)}.",
                )
        if len(running) <= most:
            return
        time.sleep(POLL)
