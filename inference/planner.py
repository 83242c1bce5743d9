"""What a draft's nodes cost where the target runs, and the plan that pays there.

A node pays where the tokens that it brings take less time than they would elsewhere (`Plan.worth`).
What it costs differs: 0.03 or 0.05 of a forward on two CPU cores of two kinds; a GPU's is not known
here.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from math import log2
from statistics import median
from weakref import WeakKeyDictionary

import torch

from ..heads.draft import Plan
from ..heads.errors import InputError
from ..heads.protocols import Drafter
from ..heads.shapes import check_tree
from .drafters import Merged, Plain
from .ngram import NGram
from .target import TargetModel

MEASURED = "measured"
"""The plan that is asked for by this name goes by the cost of a node on this machine."""
CPU_COST = 0.05
"""A node's cost on a CPU where it is not measured: SmolLM2-135M's on two cores of an AMD EPYC; on
two of an Intel Xeon it is 0.03.  Fixed, so that a seed gives the same text in every run."""
LEAST, MOST = 2.0**-7, 0.25
"""Bounds of a measured cost, in forwards."""
SPEEDUP = 1.6
"""A usual one: a node pays at a chance of its cost times the speedup that there is."""
NODES = 16
"""Nodes of a tree at most; most rounds stop sooner, where a node no longer pays."""
PAIRS, SECONDS = 9, 3.0
"""Of a measurement: pairs of forwards, fewer where they take so long; a target whose forward alone
does is not measured."""

_COSTS: WeakKeyDictionary[TargetModel, float] = WeakKeyDictionary()


def default_plan(drafter: Drafter, target: TargetModel) -> Plan:
    """What does best without further knowledge: on a CPU for the cost that is usual there, so that
    it is the same every time; elsewhere for the cost that is measured."""
    if target.device.type == "cpu":
        return paying_plan(drafter, CPU_COST)
    return measured_plan(drafter, target)


def measured_plan(drafter: Drafter, target: TargetModel) -> Plan:
    """A tree of the nodes that are likely enough for what they cost here."""
    return paying_plan(drafter, node_cost(target) if drafter.max_depth else CPU_COST)


def paying_plan(drafter: Drafter, cost: float) -> Plan:
    """A tree of the nodes that are likely enough.

    Args:
        cost: time of one more node, in forwards.
    """
    return Plan(drafter.max_depth, nodes=NODES, worth=round(SPEEDUP * cost, 4))


def node_cost(target: TargetModel) -> float:
    """Time that one more node adds to the forward of one row, over the time of the root alone;
    measured once a target, and rounded to a power of the root of two, so that noise seldom makes
    another plan of it."""
    if target not in _COSTS:
        _COSTS[target] = _measured_cost(target)
    return _COSTS[target]


@torch.inference_mode()
def _measured_cost(target: TargetModel) -> float:
    """By the median of pairs of forwards, over the root and over `NODES` nodes more, one after the
    other, so that what else the machine does is in both.  `CPU_COST` for a target that has no room
    for them, does not run, or takes too long."""
    if target.max_positions <= NODES or target.device.type == "meta":
        return CPU_COST
    ids_BN = torch.arange(NODES + 1, device=target.device)[None] * 7 % target.vocab_size
    cache = target.new_cache(1, NODES + 1)

    def seconds(nodes: int) -> float:
        ancestors = torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
        _finish(target.device)
        begin = time.perf_counter()
        states = target.forward(ids_BN[:, :nodes], cache, ancestors, None, [])
        target.logits(states["hidden"])
        _finish(target.device)
        return time.perf_counter() - begin

    if seconds(1) > SECONDS:  # its weights come from a disk, for one
        return CPU_COST
    seconds(1 + NODES)  # first calls allocate
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < PAIRS and (not ratios or time.perf_counter() - begin < SECONDS):
        root = seconds(1)
        ratios.append(seconds(1 + NODES) / root)
    cost = (median(ratios) - 1) / NODES
    return 2 ** (round(2 * log2(min(MOST, max(LEAST, cost)))) / 2)


def _finish(device: torch.device) -> None:
    """Waits for what was asked of the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def build_plan(asked: Plan | int | str | None, drafter: Drafter, target: TargetModel) -> Plan:
    """The plan that is asked for.

    Args:
        asked: a Plan, the depth of a chain, or `MEASURED`; None for as long a chain as the drafter
            has.
    Raises:
        InputError: a value out of range or a tree that is none.
    """
    deepest = drafter.max_depth
    if asked is None:
        return Plan(depth=deepest)
    if isinstance(asked, str):
        if asked != MEASURED:
            raise InputError(f"plan is {asked!r}", f"Give a Plan, a number or {MEASURED!r}.")
        return measured_plan(drafter, target)
    plan = asked if isinstance(asked, Plan) else Plan(depth=asked)
    for name, low in (("depth", 0), ("nodes", 0), ("tokens", 1)):
        value = getattr(plan, name)
        if value is not None and (type(value) is not int or value < low):
            raise InputError(f"plan {name} is {value!r}", f"Give an integer, {low} or more.")
    for name in ("confidence", "worth"):
        value = getattr(plan, name)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise InputError(f"plan {name} is {value!r}", "Give a number in [0, 1].")
    levels = 0
    if plan.tree is not None:
        try:
            plan = replace(plan, tree=tuple(tuple(path) for path in plan.tree))
            check_tree(plan.tree or ())
        except (TypeError, ValueError) as error:
            raise InputError(
                f"plan tree: {error}", "List every node once, as child ranks."
            ) from None
        levels = max(map(len, plan.tree or ()), default=0)
        if 0 < plan.depth < levels:
            raise InputError(
                f"plan.tree is {levels} deep, plan.depth is {plan.depth}",
                f"Give depth={levels} too, or a tree that is no deeper.",
            )
    if plan.depth > deepest:
        warnings.warn(
            f"a draft of {plan.depth} tokens was asked for, {drafter.name} drafts {deepest}: cut "
            f"to {deepest}",
            stacklevel=4,
        )
    followed = _tree_depth(drafter)
    if plan.tree is not None and not followed:
        warnings.warn(
            f"plan.tree is ignored: {drafter.name} drafts no tree of a given shape", stacklevel=4
        )
    elif followed < min(levels, deepest):
        warnings.warn(
            f"plan.tree is {levels} deep, {drafter.name} drafts {followed} of it: cut to "
            f"{followed}",
            stacklevel=4,
        )
    return plan.capped(deepest)


def _tree_depth(drafter: Drafter) -> int:
    """How deep it, or one of its parts, follows `Plan.tree`; 0 for not at all.  A drafter from
    elsewhere need not say."""
    if isinstance(drafter, Merged):
        return max(map(_tree_depth, drafter.drafters))
    follows = not isinstance(drafter, NGram | Plain) and getattr(drafter, "trees", True)
    return drafter.max_depth if follows else 0
