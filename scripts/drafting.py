"""How commands name a drafter and a plan: the options, and what they build."""

from __future__ import annotations

import argparse
from typing import Any

from selfdraft.heads.draft import Plan
from selfdraft.heads.errors import InputError
from selfdraft.inference.assembly import build_plan
from selfdraft.inference.speculator import Speculator


def add_options(cli: argparse.ArgumentParser) -> None:
    """The options of every command that generates."""
    cli.add_argument("heads", nargs="?", help="a heads folder or hub id, e.g. runs/quickstart")
    cli.add_argument(
        "--drafter", help="heads+ngram (default), heads, ngram, none, or a draft model's name"
    )
    cli.add_argument(
        "--draft", type=int, help="tokens drafted in a row; the drafter's own if unset"
    )
    cli.add_argument("--nodes", type=int, help="size of the draft tree; the drafter's own if unset")
    cli.add_argument("--target", help="another target than the one the heads name")
    cli.add_argument("--gguf-file", help="a file in the folder that --target names")
    cli.add_argument("--device", help="auto, cpu or cuda; auto if unset")
    cli.add_argument("--dtype", help="float32, bfloat16, float16; the trained one if unset")


def load(options: argparse.Namespace, **more: Any) -> Speculator:
    """The speculator that the options ask for.

    Raises:
        InputError: names or numbers that do not fit.
    """
    for name in ("draft", "nodes"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise InputError(f"--{name} is {value}", "Give 0 or more.")
    named = {name: getattr(options, name) for name in ("gguf_file", "device", "dtype")}
    named = {name: value for name, value in named.items() if value is not None}
    spec = Speculator.from_pretrained(
        options.heads, target=options.target, drafter=options.drafter, **named, **more
    )
    depth = spec.plan.depth if options.draft is None else options.draft
    # A draft length alone asks for chains of it.
    nodes = options.nodes if options.draft is not None or options.nodes else spec.plan.nodes
    if (depth, nodes) != (spec.plan.depth, spec.plan.nodes):
        spec.plan = build_plan(Plan(depth, nodes), spec.drafter)
    return spec
