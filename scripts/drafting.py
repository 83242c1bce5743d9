"""How commands name a drafter and a plan: the options, and what they build."""

from __future__ import annotations

import argparse
from typing import Any

from selfdraft.heads.draft import Plan
from selfdraft.heads.errors import InputError
from selfdraft.heads.protocols import Drafter
from selfdraft.inference.planner import NODES, default_plan, measured_plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel


def add_options(cli: argparse.ArgumentParser, *, plan: bool = True) -> None:
    """The options of every command that generates.

    Args:
        plan: those of the draft's size too, for a command that does not set it itself.
    """
    cli.add_argument("heads", nargs="?", help="a heads folder or hub id, e.g. runs/quickstart")
    cli.add_argument(
        "--drafter", help="heads+ngram (default), heads, ngram, none, or a draft model's name"
    )
    cli.add_argument(
        "--widen", action="store_true", help="heads draft over the ids of a row's own text too"
    )
    cli.add_argument("--target", help="another target than the one the heads name")
    cli.add_argument("--gguf-file", help="a file in the folder that --target names")
    cli.add_argument("--device", help="auto, cpu or cuda; auto if unset")
    if plan:
        cli.add_argument("--draft", type=int, help="chains of so many tokens")
        cli.add_argument("--nodes", type=int, help="trees of so many nodes")
        cli.add_argument("--worth", type=float, help="leave out nodes less likely than this")
        cli.add_argument(
            "--measured", action="store_true", help="trees of the nodes that pay on this machine"
        )
    cli.add_argument("--dtype", help="float32, bfloat16, float16; the trained one if unset")


def load(options: argparse.Namespace) -> Speculator:
    """The speculator that the options ask for.

    Raises:
        InputError: names or numbers that do not fit.
    """
    sizes = _sizes(options)
    for name, value in sizes.items():
        if not value >= 0:
            raise InputError(f"--{name} is {value}", "Give 0 or more.")
    measured = getattr(options, "measured", False)
    if measured and sizes:
        raise InputError(
            f"--measured beside --{' and --'.join(sizes)}", "It sets them: leave one of both out."
        )
    named = {name: getattr(options, name) for name in ("gguf_file", "device", "dtype")}
    named = {name: value for name, value in named.items() if value is not None}
    spec = Speculator.from_pretrained(
        options.heads,
        target=options.target,
        drafter=options.drafter,
        widen=options.widen,
        plan=0,  # until the drafter is known
        **named,
    )
    spec.plan = plan(options, spec.target, spec.drafter)
    return spec


def plan(options: argparse.Namespace, target: TargetModel, drafter: Drafter) -> Plan:
    """What the options ask of a drafter, as `Speculator` takes it; its default without any."""
    sizes = _sizes(options)
    if not sizes:
        measured = getattr(options, "measured", False)
        return measured_plan(drafter, target) if measured else default_plan(drafter, target)
    nodes = sizes.get("nodes", None if "draft" in sizes else NODES)
    depth, worth = sizes.get("draft", drafter.max_depth), sizes.get("worth", 0.0)
    return Plan(depth, nodes, worth=worth)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Those of --draft, --nodes and --worth that are given."""
    found = {name: getattr(options, name, None) for name in ("draft", "nodes", "worth")}
    return {name: value for name, value in found.items() if value is not None}
