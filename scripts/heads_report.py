"""A comparison of heads as a page: tables of what was measured, and plots beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from selfdraft.heads.errors import InputError


def check_plots() -> None:
    """Raises InputError where matplotlib is missing, before anything slow."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "matplotlib draws the plots and is not installed", 'pip install "selfdraft[plots]"'
        )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table: three decimals below ten, nothing for None, lists as their entries."""
    lines = [
        columns,
        ["---"] + ["---:"] * (len(columns) - 1),
        *([_cell(v) for v in r] for r in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{entry:.3f}" for entry in value if entry is not None)
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def write_page(report: dict[str, Any], path: Path) -> None:
    """STEM.md and its plots beside the report's JSON file at `path`."""
    plots = [plot_speed(report, path), plot_tau(report, path)]
    facts = "; ".join(f"{key}: {value}" for key, value in report["conditions"].items())
    parts = [
        "# Heads compared",
        f"From [{path.name}]({path.name}), by scripts/compare_heads.py. Conditions: {facts}.",
        "## Training",
        table(TRAINED, report["heads"]),
        "Minutes are of training steps, all on the same answers (tokens: answer tokens that were "
        "learned from). tau: tokens a round of a chain, of the head at its end, "
        "greedy and sampled at temperature 1, on held-out answers of that temperature where the "
        "data has them; by depth, the probability that the first k drafted tokens are accepted.",
        "## Speed",
        _speed(report),
        "x plain: tokens a second over those of plain decoding, x hf: of transformers' generate, "
        'with the prompts\' prefill and, under "decoding", without it; s.e.: standard error over '
        "prompts. identical: texts equal to plain decoding's.",
        *_differences(report),
        *_acceptance(report),
        "## Speedup over plain decoding by category",
        _by_category(report, "speedup_vs_plain"),
        "## Tokens a round by category",
        _by_category(report, "tokens_per_round"),
        *(f"![{plot.stem}]({plot.name})" for plot in plots),
    ]
    path.with_suffix(".md").write_text("\n\n".join(part.strip() for part in parts) + "\n")


TRAINED = {
    "name": "head",
    "parameters": "parameters",
    "minutes": "minutes",
    "steps": "steps",
    "tokens_per_second": "tokens/s",
    "tau": "tau T=0",
    "tau_by_depth": "by depth",
    "tau_t1": "tau T=1",
    "tau_t1_by_depth": "by depth",
}
TIMED = {
    "name": "method",
    "parameters": "parameters",
    "tokens_per_second": "tokens/s",
    "tokens_per_round": "tokens a round",
    "speedup_vs_plain": "x plain",
    "speedup_vs_plain_se": "± s.e.",
    "decode_speedup_vs_plain": "decoding",
    "speedup_vs_hf": "x hf",
    "decode_speedup_vs_hf": "decoding",
    "identical": "identical",
}


def table(columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> str:
    """The figures named by the keys of `columns`, under its values."""
    return markdown(list(columns.values()), ([row.get(name) for name in columns] for row in rows))


def _speed(report: dict[str, Any]) -> str:
    sizes = {head["name"]: head["parameters"] for head in report["heads"]}
    rows = ({"parameters": sizes.get(r["name"].split("+")[0]), **r} for r in report["rows"])
    return table(TIMED, rows)


def _differences(report: dict[str, Any]) -> list[str]:
    """Where texts differ from plain decoding's, how near the tie was."""
    gaps = [gap["logit_gap"] for row in report["rows"] for gap in row["differences"]]
    if not gaps:
        return []
    return [
        f"{len(gaps)} texts differ, where the two best logits are {max(gaps):.1e} apart or less."
    ]


def _acceptance(report: dict[str, Any]) -> list[str]:
    """Of sampled chains."""
    if "acceptance" not in report:
        return []
    columns = ("head", "depth", "judged", "accepted", "1 - TV")
    keys = ("judged", "accepted", "one_minus_tv")
    rows = [
        [entry["name"], depth, int(values[0]), *([v] for v in values[1:])]
        for entry in report["acceptance"]
        for depth, values in enumerate(zip(*(entry[k] for k in keys), strict=True), start=1)
    ]
    text = "Sampled chains: draft tokens judged, the share accepted, and the mean of 1 - TV."
    return ["## Acceptance", markdown(columns, rows), text]


def _by_category(report: dict[str, Any], name: str) -> str:
    rows = report["rows"]
    categories = list(rows[0]["by_category"])
    cells = ([r["name"], *(r["by_category"][c][name] for c in categories)] for r in rows)
    return markdown(("method", *categories), cells)


# -- plots ---------------------------------------------------------------------------------------


def plot_speed(report: dict[str, Any], path: Path) -> Path:
    """Bars: speedup over plain decoding, with prefill and without."""
    rows = [row for row in report["rows"] if row["name"] != "plain"]
    series = {
        "with prefill": [row["speedup_vs_plain"] for row in rows],
        "decoding": [row["decode_speedup_vs_plain"] for row in rows],
    }
    where = path.with_name(f"{path.stem}_speed.svg")
    return _bars([row["name"] for row in rows], series, "speedup over plain decoding", where)


def plot_tau(report: dict[str, Any], path: Path) -> Path:
    """Bars: held-out tau of each head, greedy and sampled."""
    heads = report["heads"]
    series = {f"T={t}": [head[n] for head in heads] for t, n in enumerate(("tau", "tau_t1"))}
    where = path.with_name(f"{path.stem}_tau.svg")
    return _bars([head["name"] for head in heads], series, "held-out tau", where)


def _bars(names: list[str], series: dict[str, list[float]], label: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(7, 0.5 + 0.45 * len(names)))
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        bars = axes.barh(places, [value or 0 for value in values], width, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(label)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path
