"""Lets the target of a config answer its prompts; the answers are what heads are trained on.

python scripts/prepare_data.py CONFIG [key=value ...]      A second run goes on where one was ended.
"""

from __future__ import annotations

import argparse
import time

from selfdraft.heads.errors import exit_code
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.train.answers import answer_all, open_answers, plan_requests, read_prompts
from selfdraft.train.config import Answer, TrainConfig, load_config
from selfdraft.train.recording import Recorder


def prepare(config: TrainConfig) -> int:
    """Answers what is not yet answered and prints what was done."""
    prompts, skipped = read_prompts(config)
    target = TargetModel.load(**config.target.model_dump(), seed=config.seed)
    speculator = Speculator(target)

    def generate(
        ids: list[list[int]], answer: Answer, seeds: list[int], record: Recorder | None
    ) -> list[list[int]]:
        return speculator.generate(
            ids,
            max_new_tokens=config.data.max_new_tokens,
            do_sample=answer.temperature > 0,
            temperature=answer.temperature or 1.0,
            top_p=answer.top_p,
            seed=seeds,
            batch_size=len(ids),
            record=record,
        ).token_ids

    requests, too_long = plan_requests(config, target, prompts)
    done = open_answers(config, target, prompts)
    wanted = [request for request in requests if request.seed not in done]
    begin = time.perf_counter()
    tokens = answer_all(config, target, wanted, generate)
    seconds = time.perf_counter() - begin
    if too_long:
        skipped["prompt too long"] += too_long
    for reason, count in skipped.items():
        print(f"skipped {count} prompts: {reason}")
    print(
        f"{config.answers_file}: {len(requests)} rows, {len(requests) - len(wanted)} of them were "
        f"there; {tokens} new tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses the command line; bad input is two lines on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="Let the target answer a config's prompts.")
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: prepare(load_config(arguments.config, arguments.overrides)))


if __name__ == "__main__":
    raise SystemExit(main())
