"""What a benchmark measured, as JSON rows and as a table."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

from selfdraft.inference.rounded import rounding_available
from selfdraft.inference.target import TargetModel
from selfdraft.train.config import PACKAGE

BASES = ("plain", "hf")
"""Methods that the others are compared with; the second is not always there."""
Generate = Callable[[list[int]], tuple[list[int], float, dict[str, float]]]
"""Prompt ids -> new ids, target forwards after the prefill, seconds by part, prefill among them."""


class Run(NamedTuple):
    """What one way to generate did on one prompt.

    Attributes:
        ids: the new tokens.
        seconds: wall time, the prefill included.
        rounds: target forwards after the prefill.
        parts: seconds by part.
    """

    ids: list[int]
    seconds: float
    rounds: float
    parts: dict[str, float]


@dataclass
class Method:
    """One way to generate, and its runs, one a prompt."""

    name: str
    generate: Generate
    runs: list[Run] = field(default_factory=list)
    warm: bool = False

    def run(self, prompt: list[int]) -> Run:
        """Times one prompt; a first call, which allocates and loads, is not counted."""
        if not self.warm:
            self.generate(prompt[:64])
            self.warm = True
        start = time.perf_counter()
        ids, rounds, parts = self.generate(prompt)
        return Run(ids, time.perf_counter() - start, rounds, parts)


def row(
    method: Method, by_name: dict[str, Method], categories: list[str], greedy: bool = True
) -> dict[str, Any]:
    """The figures of one method, as they stand in the JSON.

    Args:
        greedy: texts are to be the same; samples are not compared.
    """
    every = list(range(len(method.runs)))
    bases = {name: by_name[name] for name in BASES if name in by_name}
    found = {"name": method.name, **_figures(method, bases, every, greedy)}
    for name in BASES:
        base = bases.get(name)
        found[f"median_speedup_vs_{name}"] = base and _median_speedup(method, base)
        found[f"speedup_vs_{name}_se"] = base and _standard_error(method.runs, base.runs)
    found["seconds_by_part"] = dict(sum((Counter(run.parts) for run in method.runs), Counter()))
    found["by_category"] = {
        category: _figures(method, bases, [i for i in every if categories[i] == category], greedy)
        for category in dict.fromkeys(categories)
    }
    return found


def _figures(
    method: Method, bases: dict[str, Method], index: list[int], greedy: bool
) -> dict[str, Any]:
    """Of the prompts in `index`: sums, and rates over those of the base methods."""
    runs = [method.runs[i] for i in index]
    tokens, seconds = sum(len(run.ids) for run in runs), sum(run.seconds for run in runs)
    found: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_round": (tokens - len(runs)) / max(sum(run.rounds for run in runs), 1),
    }
    for name in BASES:
        others = [bases[name].runs[i] for i in index] if name in bases else None
        found[f"speedup_vs_{name}"] = others and _rate(runs) / _rate(others)
        found[f"decode_speedup_vs_{name}"] = others and _decode_rate(runs) / _decode_rate(others)
    plain = [bases["plain"].runs[i] for i in index]
    equal = sum(a.ids == b.ids for a, b in zip(runs, plain, strict=True))
    found["identical"] = f"{equal}/{len(runs)}" if greedy else None
    return found


def _rate(runs: list[Run]) -> float:
    """Tokens a second."""
    return sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs)


def _decode_rate(runs: list[Run]) -> float:
    """Tokens a second behind the prefill, which gives each prompt's first."""
    seconds = sum(run.seconds - run.parts["prefill"] for run in runs)
    return max(1, sum(len(run.ids) - 1 for run in runs)) / seconds


def _median_speedup(method: Method, base: Method) -> float:
    pairs = zip(method.runs, base.runs, strict=True)
    return median(_rate([mine]) / _rate([other]) for mine, other in pairs)


def _standard_error(runs: list[Run], others: list[Run]) -> float | None:
    """Of the speedup, over prompts: how much it would vary with others of their kind, and with what
    else the machine did.  To first order a prompt moves the log of a ratio of sums by what its own
    terms are of those sums.  None for a single prompt."""
    if len(runs) < 2:
        return None
    moves = [0.0] * len(runs)
    for side, sign in ((runs, 1), (others, -1)):
        tokens, seconds = (sum(len(r.ids) for r in side), sum(r.seconds for r in side))
        for i, run in enumerate(side):
            moves[i] += sign * (len(run.ids) / tokens - run.seconds / seconds)
    squares = sum(move**2 for move in moves) * len(moves) / (len(moves) - 1)
    return _rate(runs) / _rate(others) * math.sqrt(squares)


def first_difference(mine: list[int], other: list[int]) -> int | None:
    """Where two outputs part; None where they do not."""
    if mine == other:
        return None
    pairs = enumerate(zip(mine, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(other)))


def differences(
    target: TargetModel, method: Method, plain: Method, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """First difference from plain on each prompt, with the target's top-2 logit gap there: a gap
    of rounding size is a near tie, a larger one a fault."""
    found = []
    for number, runs in enumerate(zip(method.runs, plain.runs, strict=True)):
        mine, other = (run.ids for run in runs)
        at = first_difference(mine, other)
        if at is None:
            continue
        ids = torch.tensor([prompts[number] + other[:at]], device=target.device)
        hidden = target.features(ids, torch.tensor([ids.shape[1]]), [])["hidden"][0, -1]
        top = target.logits(hidden).topk(2).values.tolist()
        found.append({"prompt": number, "token": at, "logit_gap": top[0] - top[1]})
    return found


def conditions(target: TargetModel, law: str = "greedy", **of_the_run: Any) -> dict[str, Any]:
    """What the figures depend on.

    Args:
        law: greedy, or a temperature.
    """
    return {
        **target.conditions(),
        "head_linears": "weights in 8 bits" if target.packed and rounding_available() else "torch",
        **of_the_run,
        "sampling": f"{law}, one prompt at a time, wall time with prefill",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "peak_memory_gb": peak_memory_gb(),
    }


def peak_memory_gb() -> float:
    """Of this process so far, in 1e9 bytes: allocated on the GPU, or resident."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)


def commit() -> str:
    """Of the checkout, with a + where the code is another by now; `unknown` for an installed copy,
    or without git."""
    if not (PACKAGE / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(PACKAGE)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"])
    return (head.stdout.strip() or "unknown") + ("+" if changed.returncode else "")


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def write(report: dict[str, Any], path: str | None) -> None:
    """The report as a JSON file, where one is asked for."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(report, indent=1) + "\n")


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    table = Table(title=report["conditions"]["sampling"])
    columns = ("method", "tokens/s", "tokens a round", "x plain", "decoding", "x hf", "identical")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for entry in report["rows"]:
        hf = entry["speedup_vs_hf"]
        table.add_row(
            entry["name"],
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['tokens_per_round']:.2f}",
            f"{entry['speedup_vs_plain']:.2f}",
            f"{entry['decode_speedup_vs_plain']:.2f}",
            "" if hf is None else f"{hf:.2f}",
            entry["identical"] or "",
        )
    console = Console(width=100)
    console.print(table)
    for entry in report["rows"]:
        for gap in entry["differences"]:
            console.print(
                f"{entry['name']}: prompt {gap['prompt']} differs from plain at token "
                f"{gap['token']}, where the top two logits are {gap['logit_gap']:.1e} apart"
            )
        if entry["speedup_vs_plain"] < 1 and not entry["name"].startswith("hf"):
            console.print(f"{entry['name']} is slower than plain decoding here")
    facts = report["conditions"]
    console.print(", ".join(f"{key}: {value}" for key, value in facts.items()), style="dim")
