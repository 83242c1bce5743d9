"""Times trained heads against other ways to generate, prompt by prompt in one process.

python scripts/bench.py runs/quickstart --against plain,hf,hf_lookup --json bench.json

Greedy, one prompt at a time, wall time with the prompt's prefill.  `hf` and `hf_lookup` are
transformers' own generate and prompt lookup on a second, stock copy of the same weights.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from selfdraft.heads.base import Head
from selfdraft.heads.errors import InputError, exit_code, nearest
from selfdraft.heads.protocols import Drafter
from selfdraft.inference import loading
from selfdraft.inference.assembly import default_plan
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import drafting
from selfdraft.scripts.bench_report import Method, conditions, differences, row, show, write
from selfdraft.train.config import resolve_path
from selfdraft.train.formats import prompt_messages
from selfdraft.train.reading import RowError, read_rows

KNOWN = "plain,hf,hf_lookup,ngram,heads,heads+ngram"
LOOKUP_TOKENS = 10  # transformers' usual number of tokens copied from the prompt


def speculator_method(
    name: str, spec: Speculator, new_tokens: int, parts: dict[str, Any]
) -> Method:
    """A method on our loop; adds the seconds of each part to `parts[name]`."""

    def generate(prompt: list[int]) -> tuple[list[int], float]:
        out = spec.generate(prompt, max_new_tokens=new_tokens)
        for part, seconds in out.stats.seconds.items():
            parts.setdefault(name, {}).setdefault(part, 0.0)
            parts[name][part] += seconds
        return out.token_ids[0], out.stats.rounds

    return Method(name, generate)


def stock_method(name: str, model: Any, eos_ids: set[int], new_tokens: int) -> Method:
    """transformers' generate on a stock model, with prompt lookup for `hf_lookup`."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    options |= {"pad_token_id": next(iter(eos_ids), 0), "eos_token_id": sorted(eos_ids) or None}
    if name == "hf_lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    calls = [0]
    model.get_decoder().register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def generate(prompt: list[int]) -> tuple[list[int], float]:
        calls[0] = 0
        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist(), calls[0] - 1

    return Method(name, generate)


def stock_model(target: TargetModel) -> Any:
    """A second copy of the target's weights as transformers loads them, nothing packed."""
    named = target.spec.identity
    if named["random"] is not None:
        model, _ = loading.random_model(named["random"], named["seed"], target.dtype)
    else:
        keys = ("gguf_file", "revision", "adapter")
        options = {key: named[key] for key in keys}
        model, _ = loading.load_pretrained(named["model"], dtype=target.dtype, **options)
    return model.to(target.device).eval()


def build_methods(
    spec: Speculator, against: list[str], new_tokens: int, parts: dict[str, Any]
) -> list[Method]:
    """Plain and the loaded drafter always, and what `against` adds.

    Raises:
        InputError: a name in `against` that is none.
    """
    known = KNOWN.split(",")
    for name in against:
        if name not in known:
            raise InputError(f"--against {name!r} is unknown", nearest(name, known))
    target, asked = spec.target, {"heads": Head, "heads+ngram": Merged, "ngram": NGram}
    ours = {"plain": Speculator(target)}
    drafters = drafters_of(spec)
    if len(drafters) == 1 and {"heads", "heads+ngram"} & set(against):
        raise InputError("--against names heads, but none are loaded", "Give a heads folder.")
    for name in against:
        for drafter in drafters.values():
            if name in asked and isinstance(drafter, asked[name]):
                ours[drafter.name] = Speculator(target, drafter, default_plan(drafter))
    ours[spec.drafter.name] = spec
    methods = [speculator_method(name, one, new_tokens, parts) for name, one in ours.items()]
    stock = [name for name in ("hf", "hf_lookup") if name in against]
    if stock:
        model = stock_model(target)
        methods[1:1] = [stock_method(name, model, target.eos_ids, new_tokens) for name in stock]
    return methods


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
    """Prompt ids and categories of a JSONL file; what cannot be used is counted by reason.

    Raises:
        InputError: no file, or no prompt that fits.
    """
    skipped: Counter[str] = Counter()
    prompts: list[list[int]] = []
    categories: list[str] = []
    room = target.spec.max_positions - new_tokens
    for _, entry in read_rows(resolve_path(path), skipped):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            ids = target.chat_ids(prompt_messages(entry))
        except RowError as error:
            skipped[str(error)] += 1
            continue
        if len(ids) > room:
            skipped["prompt leaves no position for the answer"] += 1
            continue
        prompts.append(ids)
        categories.append(str(entry.get("category", "all")))
    for reason, count in skipped.items():
        print(f"skipped {count} prompts: {reason}")
    if not prompts:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in skipped.items())
        raise InputError(f"{path}: no usable prompt: {reasons}", 'Rows want {"prompt": "..."}.')
    return prompts, categories


def run(options: argparse.Namespace) -> int:
    """Benchmarks and prints; writes the JSON where one is asked for."""
    for name in ("max_new_tokens", "limit"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} is {value}", "Give 1 or more.")
    spec = drafting.load(options)
    target, against = spec.target, options.against.split(",")
    ids, categories = read_prompts(options.prompts, options.limit, target, options.max_new_tokens)
    parts: dict[str, Any] = {}
    methods = build_methods(spec, against, options.max_new_tokens, parts)
    for method in methods:  # not counted: first calls allocate and load
        method.generate(ids[0][:64])
    parts.clear()
    for prompt in tqdm(ids, desc="bench", unit="prompt"):
        for method in methods:
            method.run(prompt)
    by_name = {method.name: method for method in methods}
    rows = [row(method, by_name, categories) for method in methods]
    for entry, method in zip(rows, methods, strict=True):
        entry["differences"] = differences(target, method, by_name["plain"], ids)
        entry["seconds_by_part"] = parts.get(method.name, {})
    facts = conditions(
        target,
        heads=spec.drafter.name,
        depth=spec.plan.depth,
        nodes=spec.plan.nodes,
        worth=spec.plan.worth,
        prompts=len(ids),
        prompt_file=Path(options.prompts).name,
        max_new_tokens=options.max_new_tokens,
    )
    report = {"conditions": facts, "rows": rows}
    show(report)
    write(report, options.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    drafting.add_options(cli)
    cli.add_argument("--prompts", default="configs/prompts/bench.jsonl", help="JSONL file")
    cli.add_argument("--limit", type=int, help="use the first N prompts")
    cli.add_argument("--max-new-tokens", type=int, default=96)
    cli.add_argument("--against", default="plain,hf", help="of " + KNOWN)
    cli.add_argument("--json", help="write the report here")
    options = cli.parse_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
