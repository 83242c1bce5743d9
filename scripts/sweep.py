"""Trains variants of a config for equal minutes or steps, with several seeds: what each gains.

python scripts/sweep.py configs/hydra.yaml --variants configs/variants/losses.yaml --minutes 3

losses.yaml names what each variant sets, a line each, such as  tv: {head.loss: tv}; the config as
it is stands beside them as `base`.  A gain is a difference of held-out tau between two runs of one
seed.  With --minutes and --steps each variant is trained twice, once for each.  A second run of the
command goes on where one was ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.assembly import build_drafter
from selfdraft.inference.planner import CPU_COST, paying_plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import bench, experiments, runs
from selfdraft.scripts.bench_report import conditions, write
from selfdraft.scripts.experiments import Variant
from selfdraft.scripts.heads_report import table
from selfdraft.scripts.trained import Steps, figures, steps

BASE = "base"
COLUMNS = {
    "name": "variant",
    "trained": "trained for",
    "parameters": "parameters",
    "tokens_per_second": "training tokens/s",
    "tau": "tau T=0",
    "gain": "gain",
    "gain_se": "± s.e.",
    "tau_t1": "tau T=1",
    "gain_t1": "gain",
    "gain_t1_se": "± s.e.",
    "compared_steps": "at equal steps",
    "step_tau": "tau",
    "step_gain": "gain",
    "step_gain_se": "± s.e.",
    "draft_ms": "ms a draft (first seed)",
    "tokens_per_round": "decoded tau (first seed)",
}


def decoded(
    variant: Variant, target: TargetModel, prompts: list[list[int]], asked: dict[str, Any]
) -> dict[str, float]:
    """What a round of real decoding with the head alone costs and brings."""
    head = build_drafter("heads", target, variant.folder)
    spec = Speculator(target, head, paying_plan(head, CPU_COST))  # the same in every run
    spec.generate(prompts[0][:64], **asked)  # not counted: first calls allocate
    stats = spec.generate(prompts, batch_size=1, **asked).stats
    draft_ms = 1000 * stats.seconds["draft"] / max(1, stats.rounds)
    return {"draft_ms": draft_ms, "tokens_per_round": stats.tokens_per_round}


def summary(name: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a variant over its seeds, and its mean gains over the base's runs with their
    standard errors, where there are several."""
    found: dict[str, Any] = {"name": name}
    found |= {key: runs[0][key] for key in ("parameters", "compared_steps")}
    found["tokens_per_second"] = mean(run["tokens_per_second"] for run in runs)
    named = [("tau", "gain"), ("tau_t1", "gain_t1"), ("step_tau", "step_gain")]
    for tau, gain in named:
        if None in [run[tau] for run in runs]:
            continue
        gains = [mine[tau] - other[tau] for mine, other in zip(runs, base, strict=True)]
        found[tau], found[gain] = mean(run[tau] for run in runs), mean(gains)
        found[f"{gain}_se"] = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return found | {"runs": runs}


def bounds(options: argparse.Namespace) -> dict[str, list[str]]:
    """What ends the runs that are compared, and its overrides: minutes, steps, or either.

    Raises:
        InputError: neither, or a number that is none.
    """
    found = {}
    if options.minutes is not None or options.steps is None:
        found[f"{options.minutes} minutes"] = experiments.schedule(options.minutes)
    if options.steps is not None:
        found[f"{options.steps} steps"] = experiments.schedule(None, options.steps)
    return found


def run(options: argparse.Namespace) -> int:
    """Trains, decodes a little, prints, and writes JSON and page."""
    bench.check_options(options)
    ends, seeds = bounds(options), _seeds(options.seeds)
    named: dict[str, dict[str, Any]] = {BASE: {}} | experiments.read_variants(
        Path(options.variants), (BASE,)
    )
    trained = {
        end: [experiments.overridden(options, named, [*more, f"seed={s}"]) for s in seeds]
        for end, more in ends.items()
    }
    every = [v for by_seed in trained.values() for variants in by_seed for v in variants]
    config = every[0].config
    prompts, _ = bench.prompts_of(config, options)
    asked = bench.generation(options.max_new_tokens, options.temperature)
    with runs.workplace(Path(options.output)) as lock:
        runs.train_all(every, lock, options.jobs)
        target = TargetModel.load(**config.target.model_dump(), seed=config.seed)
        rows = [
            {
                "trained": end,
                "sets": named[row["name"]],
                **row,
                **decoded(v, target, prompts, asked),
            }
            for end, by_seed in trained.items()
            for v, row in zip(by_seed[0], summaries(by_seed), strict=True)
        ]
    facts = conditions(target, seeds=seeds, minutes=options.minutes, steps=options.steps)
    facts |= {"config": experiments.given(options), "trained_at_once": options.jobs}
    facts["sampling"] = f"tau held out; decoded {bench.law(options.temperature)}, head alone"
    facts |= {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens}
    _publish({"conditions": facts, "rows": rows}, Path(options.json))
    return 0


def summaries(by_seed: list[list[Variant]]) -> list[dict[str, Any]]:
    """`summary` of each variant, the base first; each seed trained all of them.  Compared at equal
    steps is the last quarter of those that every run has taken."""
    taken = {v.folder: steps(v) for variants in by_seed for v in variants}
    last = min(map(len, taken.values()))
    compared = slice(last * 3 // 4, last)
    runs = [
        [
            figures(v) | step_tau(taken[v.folder], taken[variants[0].folder], compared)
            for v, variants in zip(same, by_seed, strict=True)
        ]
        for same in zip(*by_seed, strict=True)
    ]
    return [summary(found[0]["name"], found, runs[0]) for found in runs]


def step_tau(run: Steps, base: Steps, compared: slice) -> dict[str, Any]:
    """Mean tau of the training batches of some steps, each taken before the head learned from it:
    in a first epoch, on text that is new to it.  None where these are not the base's rows."""
    mine = run[compared]
    alike = [rows for rows, _ in mine] == [rows for rows, _ in base[compared]]
    found = mean(tau for _, tau in mine) if alike else None
    return {"compared_steps": f"{compared.start + 1}-{compared.stop}", "step_tau": found}


def _publish(report: dict[str, Any], path: Path) -> None:
    shown = table(COLUMNS, report["rows"])
    facts = "; ".join(f"{key}: {value}" for key, value in report["conditions"].items())
    print(shown)
    write(report, str(path))
    text = f"# {path.stem}\n\nFrom [{path.name}]({path.name}), by scripts/sweep.py. {facts}.\n\n"
    path.with_suffix(".md").write_text(text + shown)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds {text!r} are no numbers", "Give some, as in 0,1,2.") from None
    if len({*seeds}) < len(seeds):
        raise InputError(f"--seeds {text!r} names one twice", "A run with one seed is one run.")
    return seeds


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="sweep.py", description=__doc__.splitlines()[0])
    experiments.add_options(cli, "runs/sweep")
    cli.add_argument(
        "--steps", type=int, help="of training for each variant, instead of minutes or too"
    )
    cli.add_argument("--seeds", default="0,1,2", help="comma separated")
    bench.add_options(cli)
    cli.add_argument("--json", default="docs/results/sweep.json", help="write the report here")
    cli.set_defaults(limit=4, max_new_tokens=48)
    options = cli.parse_intermixed_args(argv)
    if options.variants is None:
        cli.error("--variants is needed")
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
