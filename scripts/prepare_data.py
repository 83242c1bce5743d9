"""Lets the target of a config answer its prompts; the answers are what heads are trained on.

python scripts/prepare_data.py CONFIG [key=value ...]      A second run goes on where one was ended.

Hub datasets that the config names are fetched first.  With data.features.cache_only=true the
feature cache is filled too, so that training needs no more of the target than its two ends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.embeddings import save_ends
from selfdraft.inference.target import TargetModel
from selfdraft.train.answers import (
    Answerer,
    answer_all,
    close_answers,
    open_answers,
    plan_requests,
    read_prompts,
)
from selfdraft.train.config import TrainConfig, load_config
from selfdraft.train.data import check_data, load_documents
from selfdraft.train.distill import open_features
from selfdraft.train.formats import Conversation
from selfdraft.train.hub import fetch, is_hub
from selfdraft.train.locks import locked
from selfdraft.train.recording import layers_read


def prepare(config: TrainConfig, others: Sequence[TrainConfig] = ()) -> int:
    """Fetches, answers and computes what is not there yet, and prints what was done.

    Args:
        others: runs on the same data, whose heads may read further layers.
    Raises:
        InputError: whatever is wrong with config, data or target; several processes, or another
            one at work in output_dir or on the answers.
    """
    processes = int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1
    if processes > 1:
        raise InputError(
            f"{processes} processes are to prepare the data, and each would write all of it",
            "Run it in one: python scripts/prepare_data.py CONFIG.",
        )
    with (
        locked(Path(config.output_dir), "Choose another output_dir."),
        locked(config.answers_file, "Set data.file to another name.", file=True)
        if config.data.prompts is not None
        else nullcontext(),
    ):
        return _prepare(config, others)


def _prepare(config: TrainConfig, others: Sequence[TrainConfig]) -> int:
    data = config.data
    fetch_named(config)
    given = data.prompts is None and data.file is not None
    asked = None if given else read_prompts(config)
    if given:
        check_data(config)
        print(f"{config.answers_file} is trained on as it is, since data.prompts is not set")
        if not data.features.cache_only:
            return 0
    target = TargetModel.load(**config.target.model_dump(), seed=config.seed)
    if asked is not None:
        answer(config, target, *asked, layers_read([config, *others], target))
    if data.features.cache_only:
        fill_cache(config, target)
    return 0


def fetch_named(config: TrainConfig) -> dict[str, str]:
    """Fetches the hub datasets that the config names, where they are not there yet.

    Returns:
        the keys of `data` that name one, and where it lies.
    """
    names = {key: getattr(config.data, key) for key in ("prompts", "file")}
    found = {k: config.local_file(name) for k, name in names.items() if name and is_hub(name)}
    for key, path in found.items():
        if not path.exists():
            with locked(path, "Choose another output_dir.", file=True):
                rows = fetch(names[key], path, config.data.limit)
            print(f"{path}: {rows} rows fetched from {names[key]}")
    return {key: str(path) for key, path in found.items()}


def answer(
    config: TrainConfig,
    target: TargetModel,
    prompts: list[Conversation],
    skipped: Counter[str],
    taps: list[int],
) -> None:
    """Answers what is not yet answered, and keeps the states of layers `taps`."""
    requests, unfit = plan_requests(config, target, prompts)
    done = open_answers(config, target, prompts)
    begin = time.perf_counter()
    tokens = answer_all(config, target, requests, done, Answerer(config, target), taps)
    close_answers(config, target, prompts, unfit)
    seconds = time.perf_counter() - begin
    for reason, count in (skipped + unfit).items():
        print(f"skipped {count} prompts: {reason}")
    print(
        f"{config.answers_file}: {len(requests)} rows, {len(done)} of them were there; "
        f"{tokens} new tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    )


def fill_cache(config: TrainConfig, target: TargetModel) -> None:
    """Makes the feature cache complete, and keeps the target's ends beside it."""
    documents = load_documents(config, target)
    open_features(config, target, documents, layers_read([config], target))
    save_ends(target, config.ends_folder)
    print(f"{config.features_folder} is complete: training needs no more of the target")


def main(argv: list[str] | None = None) -> int:
    """Parses the command line; bad input is two lines on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="Let the target answer a config's prompts.")
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1")
    arguments = parser.parse_intermixed_args(argv)
    return exit_code(lambda: prepare(load_config(arguments.config, arguments.overrides)))


if __name__ == "__main__":
    raise SystemExit(main())
