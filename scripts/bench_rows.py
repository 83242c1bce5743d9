"""Times trees of several sizes in batches of several rows: where speculation stops paying.

python scripts/bench_rows.py runs/hydra --json docs/results/rows.json

Greedy; every size, the default plan (nodes that pay, 16 at most) and plain decoding (size 0)
generate the same batches, one after the other.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from selfdraft.heads.draft import Plan
from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.planner import default_plan
from selfdraft.inference.speculator import Speculator
from selfdraft.scripts import drafting
from selfdraft.scripts.bench import add_options, read_prompts
from selfdraft.scripts.bench_report import conditions, write


def measure(
    spec: Speculator, prompts: list[list[int]], rows: int, sizes: list[int], new_tokens: int
) -> list[dict[str, Any]]:
    """One entry a tree size for batches of `rows`: tokens/s, tokens a round, the ratio to plain and
    how many outputs equal plain's."""
    speculators: dict[int | str, Speculator] = {size: _with_nodes(spec, size) for size in sizes}
    plan = default_plan(spec.drafter, spec.target)
    speculators["default"] = Speculator(spec.target, spec.drafter, plan)
    seconds: dict[int | str, float] = defaultdict(float)
    tokens: dict[int | str, int] = defaultdict(int)
    same: dict[int | str, int] = defaultdict(int)
    for one in speculators.values():  # not counted: first calls allocate
        one.generate(prompts[:rows], max_new_tokens=2, batch_size=rows)
    rounds: dict[int | str, list[int]] = defaultdict(lambda: [0, 0])
    for start in range(0, len(prompts), rows):
        batch, plain = prompts[start : start + rows], None
        for size, one in speculators.items():
            begin = time.perf_counter()
            out = one.generate(batch, max_new_tokens=new_tokens, batch_size=rows)
            seconds[size] += time.perf_counter() - begin
            tokens[size] += out.stats.tokens
            rounds[size][0] += out.stats.tokens - out.stats.rows
            rounds[size][1] += out.stats.rounds
            plain = plain or out.token_ids
            same[size] += sum(a == b for a, b in zip(out.token_ids, plain, strict=True))
    rate = {size: tokens[size] / seconds[size] for size in speculators}
    return [
        {
            "rows": rows,
            "nodes": size,
            "tokens_per_second": rate[size],
            "tokens_per_round": rounds[size][0] / max(1, rounds[size][1]),
            "speedup_vs_plain": rate[size] / rate[0],
            "identical": f"{same[size]}/{len(prompts)}",
        }
        for size in speculators
    ]


def _with_nodes(spec: Speculator, nodes: int) -> Speculator:
    if not nodes:
        return Speculator(spec.target)
    return Speculator(spec.target, spec.drafter, Plan(spec.drafter.max_depth, nodes))


def show(entries: list[dict[str, Any]]) -> None:
    """A line a batch size and tree size; the best of each batch size is marked."""
    table = Table(title="greedy, batches of several rows, wall time with prefill")
    for column in ("rows", "nodes", "tokens/s", "tokens a round", "x plain", "identical", "best"):
        table.add_column(column, justify="right")
    best: dict[int, dict[str, Any]] = {}
    for entry in entries:
        known = best.get(entry["rows"])
        if known is None or entry["tokens_per_second"] > known["tokens_per_second"]:
            best[entry["rows"]] = entry
    for entry in entries:
        table.add_row(
            str(entry["rows"]),
            str(entry["nodes"]),
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['tokens_per_round']:.2f}",
            f"{entry['speedup_vs_plain']:.2f}",
            entry["identical"],
            "*" if entry is best[entry["rows"]] else "",
        )
    Console(width=100).print(table)


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and writes the JSON where one is asked for."""
    try:
        sizes, batches = ([int(n) for n in s.split(",")] for s in (options.sizes, options.rows))
    except ValueError as error:
        raise InputError(f"--sizes or --rows: {error}", "Give numbers, as in 1,2,4.") from None
    if min(sizes) < 0 or min(batches) < 1 or options.max_new_tokens < 1:
        raise InputError("a size, a row count or --max-new-tokens is too small", "Give 1 or more.")
    sizes = [0, *(size for size in sizes if size)]
    spec = drafting.load(options)
    prompts, _ = read_prompts(options.prompts, options.limit, spec.target, options.max_new_tokens)
    if max(batches) > len(prompts):
        raise InputError(
            f"--rows asks for {max(batches)} rows, there are {len(prompts)} prompts",
            "Give more prompts, a higher --limit, or fewer rows.",
        )
    entries: list[dict[str, Any]] = []
    for rows in tqdm(batches, desc="batch sizes"):
        entries += measure(spec, prompts, rows, sizes, options.max_new_tokens)
    facts = conditions(
        spec.target,
        heads=spec.drafter.name,
        nodes=spec.plan.nodes,
        worth=spec.plan.worth,
        prompts=len(prompts),
        prompt_file=Path(options.prompts).name,
        max_new_tokens=options.max_new_tokens,
    )
    facts["sampling"] = "greedy, wall time with prefill"
    show(entries)
    write({"conditions": facts, "rows": entries}, options.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="bench_rows.py", description=__doc__.splitlines()[0])
    drafting.add_options(cli, plan=False)
    add_options(cli, sampled=False)
    cli.set_defaults(limit=16, max_new_tokens=48)
    cli.add_argument("--rows", default="1,2,4,8,16", help="batch sizes")
    cli.add_argument("--sizes", default="1,2,4,7,10,15", help="nodes of the tree")
    cli.add_argument("--json", help="write the report here")
    options = cli.parse_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
