"""What a benchmark measured, as JSON rows and as a table."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from selfdraft.inference.rounded import rounding_available
from selfdraft.inference.target import TargetModel

Generate = Callable[[list[int]], tuple[list[int], float]]
"""Prompt ids -> new ids and target forwards after the prefill."""


@dataclass
class Method:
    """One way to generate, and what it did on each prompt."""

    name: str
    generate: Generate
    ids: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def run(self, prompt: list[int]) -> None:
        """Times one prompt."""
        start = time.perf_counter()
        ids, rounds = self.generate(prompt)
        self.seconds.append(time.perf_counter() - start)
        self.ids.append(ids)
        self.rounds.append(rounds)

    def rate(self, index: int) -> float:
        """Tokens a second on one prompt."""
        return len(self.ids[index]) / self.seconds[index]


def row(method: Method, by_name: dict[str, Method], categories: list[str]) -> dict[str, Any]:
    """The figures of one method, as they stand in the JSON."""
    plain, hf = by_name["plain"], by_name.get("hf")
    tokens, seconds = sum(map(len, method.ids)), sum(method.seconds)
    equal = sum(a == b for a, b in zip(method.ids, plain.ids, strict=True))
    first_tokens = len(method.ids)
    result: dict[str, Any] = {
        "name": method.name,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_round": (tokens - first_tokens) / max(sum(method.rounds), 1),
        "speedup_vs_plain": _speedup(method, plain),
        "speedup_vs_hf": _speedup(method, hf) if hf else None,
        "median_speedup_vs_plain": _median_speedup(method, plain),
        "median_speedup_vs_hf": _median_speedup(method, hf) if hf else None,
        "identical": f"{equal}/{len(plain.ids)}",
        "by_category": {},
    }
    for category in dict.fromkeys(categories):
        index = [i for i, c in enumerate(categories) if c == category]
        result["by_category"][category] = {
            "tokens_per_round": sum(len(method.ids[i]) - 1 for i in index)
            / max(sum(method.rounds[i] for i in index), 1),
            "speedup_vs_plain": _speedup(method, plain, index),
        }
    return result


def _speedup(method: Method, base: Method, index: list[int] | None = None) -> float:
    index = list(range(len(method.ids))) if index is None else index

    def rate(m: Method) -> float:
        return sum(len(m.ids[i]) for i in index) / sum(m.seconds[i] for i in index)

    return rate(method) / rate(base)


def _median_speedup(method: Method, base: Method) -> float:
    return median(method.rate(i) / base.rate(i) for i in range(len(method.ids)))


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
    for number, (mine, other) in enumerate(zip(method.ids, plain.ids, strict=True)):
        at = first_difference(mine, other)
        if at is None:
            continue
        ids = torch.tensor([prompts[number] + other[:at]], device=target.device)
        hidden = target.features(ids, torch.tensor([ids.shape[1]]), [])["hidden"][0, -1]
        top = target.logits(hidden).topk(2).values.tolist()
        found.append({"prompt": number, "token": at, "logit_gap": top[0] - top[1]})
    return found


def conditions(target: TargetModel, **of_the_run: Any) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        **target.conditions(),
        "head_linears": "weights in 8 bits" if target.packed and rounding_available() else "torch",
        **of_the_run,
        "sampling": "greedy, one prompt at a time, wall time with prefill",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


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
    table = Table(title="greedy, one prompt at a time, wall time with prefill")
    for column in ("method", "tokens/s", "tokens a round", "x plain", "x hf", "identical"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for entry in report["rows"]:
        hf = entry["speedup_vs_hf"]
        table.add_row(
            entry["name"],
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['tokens_per_round']:.2f}",
            f"{entry['speedup_vs_plain']:.2f}",
            "" if hf is None else f"{hf:.2f}",
            entry["identical"],
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
