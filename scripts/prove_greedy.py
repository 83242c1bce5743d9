"""Proves on a real model that greedy text is plain decoding's, whatever drafts it.

python scripts/prove_greedy.py runs/hydra --json docs/results/proof/greedy.json

Chains and trees of heads, n-grams and both, one row and eight at a time.  A forward over several
tokens rounds unlike one over a single token, so near ties may fall either way: each first
difference is listed with the gap of the target's two best logits in float64, and exit code 1 says
that one of them is no near tie.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from selfdraft.heads.draft import Plan
from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import drafting
from selfdraft.scripts.bench import add_options, drafters_of, read_prompts
from selfdraft.scripts.bench_report import conditions, first_difference, write
from selfdraft.scripts.stock import stock_model

MARGINS = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 0.5, torch.float16: 0.05}
"""Largest float64 gap of two logits that counts as a near tie.  float32: forwards of unlike width
move SmolLM2's logits by up to 6e-5.  bfloat16 has 8 bits: a logit of 20 is known to 0.06, and the
layers add to that."""


def ways(spec: Speculator) -> dict[str, tuple[Speculator, int]]:
    """Name -> (speculator, rows at a time) of all that is compared with plain decoding."""
    found: dict[str, tuple[Speculator, int]] = {}
    for name, drafter in drafters_of(spec).items():
        plans = {"chain": Plan(drafter.max_depth), "tree": Plan(drafter.max_depth, nodes=10)}
        for form, plan in plans.items():
            for rows in (1, 8):
                found[f"{name}, {form}, {rows} at a time"] = (
                    Speculator(spec.target, drafter, plan),
                    rows,
                )
    return found


def gap(precise: Any, target: TargetModel, ids: list[int]) -> float:
    """Distance of the two best logits after `ids`, in float64."""
    with torch.no_grad():
        inputs = torch.tensor([ids], device=target.device)
        top = precise(input_ids=inputs).logits[0, -1].double().topk(2).values
    return float(top[0] - top[1])


def run(options: argparse.Namespace) -> int:
    """Compares, prints each way's result, and writes the JSON where one is asked for."""
    if options.max_new_tokens < 1 or options.limit < 1:
        raise InputError("--limit or --max-new-tokens is too small", "Give 1 or more.")
    spec = drafting.load(options)
    target, new_tokens = spec.target, options.max_new_tokens
    prompts, _ = read_prompts(options.prompts, options.limit, target, new_tokens)
    plain = Speculator(target)
    expected = [plain.generate(p, max_new_tokens=new_tokens).token_ids[0] for p in prompts]
    precise: Any = None
    results: list[dict[str, Any]] = []
    for name, (one, rows) in tqdm(ways(spec).items(), desc="ways"):
        out = one.generate(prompts, max_new_tokens=new_tokens, batch_size=rows)
        gaps = []
        for prompt, mine, other in zip(prompts, out.token_ids, expected, strict=True):
            at = first_difference(mine, other)
            if at is not None:
                precise = precise or stock_model(target).double()
                gaps.append(gap(precise, target, prompt + other[:at]))
        tau = out.stats.tokens_per_round
        tokens = sum(map(len, out.token_ids))
        results.append({"way": name, "tokens": tokens, "tokens_per_round": tau, "gaps": gaps})
        print(f"{name}: {tokens} tokens, {tau:.2f} a round, gaps at first differences {gaps}")
    facts = conditions(
        target,
        heads=spec.drafter.name,
        prompts=len(prompts),
        prompt_file=Path(options.prompts).name,
        max_new_tokens=new_tokens,
    )
    facts["sampling"] = "greedy, one and eight rows at a time"
    report = {"conditions": facts, "largest_near_tie": MARGINS[target.dtype], "rows": results}
    write(report, options.json)
    tokens = sum(row["tokens"] for row in results)
    different = [gap for row in results for gap in row["gaps"]]
    print(f"{tokens} tokens, {len(different)} differences, widest {max(different, default=0):.1e}")
    return int(any(gap > MARGINS[target.dtype] for gap in different))


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, 1 (a difference that is no near tie) or 2 (bad input)."""
    cli = argparse.ArgumentParser(prog="prove_greedy.py", description=__doc__.splitlines()[0])
    drafting.add_options(cli, plan=False)
    add_options(cli, sampled=False)
    cli.set_defaults(limit=10)
    cli.add_argument("--json", help="write the report here")
    options = cli.parse_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
