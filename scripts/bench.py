"""Times trained heads against other ways to generate, prompt by prompt in one process.

python scripts/bench.py runs/quickstart --against plain,hf,hf_lookup --json bench.json

One prompt at a time, wall time with the prompt's prefill and without.  `hf` and `hf_lookup` are
transformers' own generate and prompt lookup on a second, stock copy of the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from selfdraft.heads.base import Head
from selfdraft.heads.draft import Plan
from selfdraft.heads.errors import InputError, exit_code, nearest
from selfdraft.heads.protocols import Drafter
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import drafting
from selfdraft.scripts.bench_report import Method, Run, conditions, differences, row, show, write
from selfdraft.scripts.stock import stock_method, stock_model
from selfdraft.train.chat import chat_ids
from selfdraft.train.config import TrainConfig, resolve_path
from selfdraft.train.formats import prompt_conversation
from selfdraft.train.reading import RowError, counted, read_rows, whole_lines

KNOWN = "plain,hf,hf_lookup,ngram,heads,heads+ngram"


def generation(new_tokens: int, temperature: float) -> dict[str, Any]:
    """Arguments of generate, by transformers' names; temperature 0 is greedy."""
    asked: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": temperature > 0}
    return asked | ({"temperature": temperature} if temperature > 0 else {})


def speculator_method(name: str, spec: Speculator, asked: dict[str, Any]) -> Method:
    """A method on our loop."""

    def generate(prompt: list[int]) -> tuple[list[int], float, dict[str, float]]:
        out = spec.generate(prompt, **asked)
        return out.token_ids[0], out.stats.rounds, out.stats.seconds

    return Method(name, generate)


def chosen(
    spec: Speculator, against: list[str], plan: Callable[[Drafter], Plan]
) -> dict[str, Speculator]:
    """The loaded drafter, and what `against` adds.

    Args:
        plan: of each drafter that is added.
    Raises:
        InputError: a name in `against` that is none.
    """
    known = KNOWN.split(",")
    for name in against:
        if name not in known:
            raise InputError(f"--against {name!r} is unknown", nearest(name, known))
    target, asked = spec.target, {"heads": Head, "heads+ngram": Merged, "ngram": NGram}
    found: dict[str, Speculator] = {}
    drafters = drafters_of(spec)
    if len(drafters) == 1 and {"heads", "heads+ngram"} & set(against):
        raise InputError(
            f"--against names heads, and drafter {spec.drafter.name} has none",
            "Give a heads folder, and leave --drafter out.",
        )
    for name in against:
        for drafter in drafters.values():
            if name in asked and isinstance(drafter, asked[name]):
                found[drafter.name] = Speculator(target, drafter, plan(drafter))
    return found | {spec.drafter.name: spec}


def build_methods(
    target: TargetModel,
    speculators: dict[str, Speculator],
    against: list[str],
    asked: dict[str, Any],
) -> list[Method]:
    """Plain, transformers' own ways that `against` names, and the speculators by name.

    Args:
        asked: see `generation`.
    """
    ours = {"plain": Speculator(target)} | speculators
    methods = [speculator_method(name, one, asked) for name, one in ours.items()]
    stock = [name for name in ("hf", "hf_lookup") if name in against]
    if stock:
        model = stock_model(target)
        methods[1:1] = [stock_method(name, model, target.eos_ids, asked) for name in stock]
    return methods


def time_all(methods: list[Method], prompts: list[list[int]], ledger: Path | None = None) -> None:
    """Times every method on every prompt, interleaved prompt by prompt; `ledger` of
    `each_prompt`."""
    lines = each_prompt(prompts, lambda ids: {m.name: m.run(ids) for m in methods}, ledger)
    for method in methods:
        method.runs = [Run(*line[method.name]) for line in lines]


def each_prompt(
    prompts: list[list[int]], measure: Callable[[list[int]], Any], ledger: Path | None = None
) -> list[Any]:
    """`measure` of each prompt.

    Args:
        ledger: keeps a JSON line a prompt; what is there is not measured again.
    """
    lines: list[Any] = []
    if ledger is not None and ledger.exists():
        whole_lines(ledger)
        lines = [json.loads(line) for line in ledger.open()]
    todo = prompts[len(lines) :]
    for prompt in tqdm(todo, total=len(prompts), initial=len(lines), desc="bench", unit="prompt"):
        lines.append(measure(prompt))
        if ledger is not None:
            with ledger.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    return lines


def measured(
    target: TargetModel,
    methods: list[Method],
    prompts: list[list[int]],
    categories: list[str],
    greedy: bool,
) -> list[dict[str, Any]]:
    """The JSON rows of all methods; where greedy texts differ from plain's, why."""
    by_name = {method.name: method for method in methods}
    rows = [row(method, by_name, categories, greedy) for method in methods]
    for entry, method in zip(rows, methods, strict=True):
        found = differences(target, method, by_name["plain"], prompts) if greedy else []
        entry["differences"] = found
    return rows


def drafters_of(spec: Speculator) -> dict[str, Drafter]:
    """By name: n-grams, the loaded head, and both in one tree."""
    merged = spec.drafter.drafters if isinstance(spec.drafter, Merged) else [spec.drafter]
    found: list[Drafter] = [NGram()]
    for head in merged:
        if isinstance(head, Head):
            found += [head, Merged([NGram(), head])]
    return {drafter.name: drafter for drafter in found}


def read_prompts(
    path: str, limit: int | None, target: TargetModel, new_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """Prompt ids and categories of a JSONL file, ids as in training; what cannot be used is counted
    by reason.

    Raises:
        InputError: no file, or no prompt that fits.
    """
    skipped: Counter[str] = Counter()
    prompts: list[list[int]] = []
    categories: list[str] = []
    room = target.max_positions - new_tokens
    for _, entry in read_rows(resolve_path(path), skipped):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            ids = chat_ids(prompt_conversation(entry), target, prompt=True)
        except RowError as error:
            skipped[str(error)] += 1
            continue
        if len(ids) > room:
            skipped["prompt leaves no position for the answer"] += 1
            continue
        prompts.append(ids)
        categories.append(str(entry.get("category", "all")))
    if not prompts:
        reason = f"{path}: no usable prompt: {counted(skipped)}"
        raise InputError(reason, 'Rows want {"prompt": "..."}.')
    if skipped:
        print(f"skipped prompts: {counted(skipped)}")
    return prompts, categories


def prompts_of(
    config: TrainConfig, options: argparse.Namespace
) -> tuple[list[list[int]], list[str]]:
    """`read_prompts` for a config's target, which is not kept: for commands that train first."""
    target = TargetModel.load(**config.target.model_dump(), seed=config.seed)
    return read_prompts(options.prompts, options.limit, target, options.max_new_tokens)


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for numbers that ask for nothing, or prompts that are not there, before
    anything slow."""
    for name in ("max_new_tokens", "limit"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} is {value}", "Give 1 or more.")
    if not 0 <= options.temperature < math.inf:
        raise InputError(f"--temperature is {options.temperature}", "Give 0 or more.")
    if not resolve_path(options.prompts).is_file():
        raise InputError(f"--prompts {options.prompts} does not exist", "Name a JSONL file.")


def law(temperature: float) -> str:
    """How conditions name it."""
    return f"temperature {temperature:g}" if temperature > 0 else "greedy"


def run(options: argparse.Namespace) -> int:
    """Benchmarks and prints; writes the JSON where one is asked for."""
    check_options(options)
    spec = drafting.load(options)
    target, against = spec.target, options.against.split(",")
    ids, categories = read_prompts(options.prompts, options.limit, target, options.max_new_tokens)
    asked = generation(options.max_new_tokens, options.temperature)
    methods = build_methods(
        target, chosen(spec, against, partial(drafting.plan, options, target)), against, asked
    )
    time_all(methods, ids)
    rows = measured(target, methods, ids, categories, not asked["do_sample"])
    facts = conditions(
        target,
        law(options.temperature),
        heads=spec.drafter.name,
        depth=spec.plan.depth,
        nodes=spec.plan.nodes,
        worth=spec.plan.worth,
        widened=options.widen,
        prompts=len(ids),
        prompt_file=Path(options.prompts).name,
        max_new_tokens=options.max_new_tokens,
    )
    report = {"conditions": facts, "rows": rows}
    show(report)
    write(report, options.json)
    return 0


def add_options(cli: argparse.ArgumentParser, *, sampled: bool = True) -> None:
    """The options of every command that times prompts.

    Args:
        sampled: that of the temperature too, for a command that is not greedy alone.
    """
    cli.add_argument("--prompts", default="configs/prompts/bench.jsonl", help="JSONL file")
    cli.add_argument("--limit", type=int, help="use the first N prompts")
    cli.add_argument("--max-new-tokens", type=int, default=96)
    if sampled:
        cli.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    drafting.add_options(cli)
    add_options(cli)
    cli.add_argument("--against", default="plain,hf", help="of " + KNOWN)
    cli.add_argument("--json", help="write the report here")
    options = cli.parse_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
