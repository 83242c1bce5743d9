"""Trains every head kind for the same minutes on the same data, and times all of them.

python scripts/compare_heads.py configs/hydra.yaml --minutes 10 --json docs/results/heads.json

Makes the data that is missing, trains each kind in a process of its own, then times heads alone and
merged with n-grams against plain decoding, transformers' generate and n-grams, prompt by prompt in
one process.  A second run goes on where one was ended.  Beside the JSON: a page with tables and
plots.  With --best-minutes the head of the best held-out tau is trained anew for so long and timed
with them.  With --temperature the drafts are sampled, and their acceptance is compared with 1 - TV.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfdraft.heads import HEADS, Head
from selfdraft.heads.errors import InputError, exit_code
from selfdraft.heads.protocols import Drafter
from selfdraft.inference.assembly import build_drafter
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram
from selfdraft.inference.planner import default_plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import bench, experiments, heads_report, runs
from selfdraft.scripts.acceptance import watch
from selfdraft.scripts.bench_report import conditions, peak_memory_gb, show, write
from selfdraft.scripts.experiments import Variant
from selfdraft.scripts.trained import figures

METHODS = ("plain", "hf", "ngram")
"""Rows of the report beside the heads'."""


def speculators(target: TargetModel, variants: list[Variant]) -> dict[str, Speculator]:
    """n-grams, and each head alone and merged with them, by row name."""
    drafters: list[Drafter] = [NGram()]
    for variant in variants:
        head = build_drafter("heads", target, variant.folder)
        head.name = variant.name
        drafters += [head, Merged([NGram(), head])]
    return {d.name: Speculator(target, d, default_plan(d, target)) for d in drafters}


def measure(
    options: argparse.Namespace,
    variants: list[Variant],
    ids: list[list[int]],
    categories: list[str],
) -> dict[str, Any]:
    """Times everything on prompts of `ids`, and says what was trained."""
    first, temperature = variants[0].config, options.temperature
    target = TargetModel.load(**first.target.model_dump(), seed=first.seed)
    tokens = options.max_new_tokens
    ours = speculators(target, variants)
    plan = ours["ngram"].plan
    facts = conditions(
        target,
        bench.law(temperature),
        prompts=len(ids),
        prompt_file=Path(options.prompts).name,
        max_new_tokens=tokens,
        nodes=plan.nodes,
        worth=plan.worth,
        config=experiments.given(options),
        minutes=options.minutes,
        best_minutes=options.best_minutes,
        trained_at_once=options.jobs,
    )
    timed = {k: v for k, v in facts.items() if k not in ("date", "peak_memory_gb")}
    of = json.dumps([timed, ids, [variant.folder.name for variant in variants]])
    ledger = Path(options.output) / f"bench-{hashlib.sha256(of.encode()).hexdigest()[:8]}.jsonl"
    methods = bench.build_methods(target, ours, ["hf"], bench.generation(tokens, temperature))
    bench.time_all(methods, ids, ledger)
    facts["peak_memory_gb"] = peak_memory_gb()
    rows = bench.measured(target, methods, ids, categories, greedy=temperature == 0)
    report = {
        "conditions": facts,
        "heads": [figures(variant) for variant in variants],
        "rows": rows,
    }
    if temperature > 0:
        report["acceptance"] = [
            acceptance(ours[v.name], ids, options, ledger.with_suffix(f".{v.name}"))
            for v in variants
        ]
    return report


def acceptance(
    spec: Speculator, prompts: list[list[int]], options: argparse.Namespace, ledger: Path
) -> dict[str, Any]:
    """Acceptance of a head's sampled chains by depth, beside the chances that its laws gave."""
    head, tokens, temperature = spec.drafter, options.max_new_tokens, options.temperature
    assert isinstance(head, Head)
    found = bench.each_prompt(
        prompts, lambda ids: watch(head, spec.target, ids, tokens, temperature), ledger
    )
    judged, accepted, chance = (
        [sum(d) for d in zip(*s, strict=True)] for s in zip(*found, strict=True)
    )
    return {
        "name": head.name,
        "judged": judged,
        "accepted": [a / n if n else None for a, n in zip(accepted, judged, strict=True)],
        "one_minus_tv": [c / n if n else None for c, n in zip(chance, judged, strict=True)],
    }


def variants_for(options: argparse.Namespace, limits: list[str]) -> list[Variant]:
    """What is compared, each within `limits`."""
    if options.variants is None:
        return experiments.kinds(options, options.kinds.split(","), limits)
    named = experiments.read_variants(Path(options.variants), METHODS)
    return experiments.overridden(options, named, limits)


def longer(options: argparse.Namespace) -> list[Variant]:
    """The same, each for --best-minutes and trained alone; none where that is not asked for.

    Raises:
        InputError: no more minutes than --minutes.
    """
    minutes = options.best_minutes
    if minutes is None:
        return []
    limits = experiments.schedule(minutes, option="--best-minutes")
    if minutes <= options.minutes:
        raise InputError(
            f"--best-minutes is {minutes}, --minutes {options.minutes}", "Give it more of them."
        )
    alone = argparse.Namespace(**vars(options) | {"jobs": 1})
    return [replace(v, name=f"{v.name}-{minutes:g}min") for v in variants_for(alone, limits)]


def run(options: argparse.Namespace) -> int:
    """Trains, times, prints, and writes JSON, page and plots."""
    bench.check_options(options)
    heads_report.check_plots()
    variants = variants_for(options, experiments.schedule(options.minutes))
    further = longer(options)
    if twice := {v.name for v in variants} & {v.name for v in further}:
        raise InputError(f"{twice.pop()} would name two heads", "Name that variant otherwise.")
    prompts = bench.prompts_of(variants[0].config, options)
    with runs.workplace(Path(options.output)) as lock:
        runs.train_all(variants, lock, options.jobs)
        if further:
            taus = [figures(variant)["tau"] for variant in variants]
            variants.append(further[taus.index(max(taus))])
            runs.train_all(variants[-1:], lock)
        report = measure(options, variants, *prompts)
    show(report)
    write(report, options.json)
    heads_report.write_page(report, Path(options.json))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="compare_heads.py", description=__doc__.splitlines()[0])
    experiments.add_options(cli, "runs/compare")
    cli.add_argument("--kinds", default=",".join(HEADS), help="head kinds, comma separated")
    cli.add_argument(
        "--best-minutes", type=float, help="of another training, of what came out best"
    )
    bench.add_options(cli)
    cli.add_argument("--json", default="docs/results/heads.json", help="write the report here")
    cli.set_defaults(minutes=10.0)
    options = cli.parse_intermixed_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
