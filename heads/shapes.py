"""Fixed shapes of draft trees: which are asked for, and what their nodes are worth."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache

from .draft import Plan, Tree

FIRST, FURTHER = 0.5, 0.4
"""What is assumed of a shape: how often a node's first child is accepted where that was not
measured, and the share of it which each further child has of the one before (of what the first
leaves, where that is less)."""
ROUNDING = 1e-6
"""Share by which an estimate may fall short of `Plan.worth`: it has been through float32."""

Rates = tuple[float, ...]
"""How often the first child of an accepted node is accepted, by the child's depth from 1; `FIRST`
at depths beyond."""


def planned_tree(plan: Plan, depth: int, trees: bool, rates: Rates = ()) -> Tree:
    """The fixed shape that `plan` asks for, nodes in the order of their depth; what does not pay by
    the shape's own chances is not grown at all.

    Args:
        depth: levels at most.
        trees: False for a head that can only draft chains.
    """
    if trees and plan.tree is not None:
        tree = _by_depth([path for path in plan.tree if len(path) <= depth])
    elif trees and plan.nodes is not None:
        tree = likely_tree(plan.nodes, depth, rates)
    else:
        tree = tuple((0,) * length for length in range(1, depth + 1))
    best = sorted(tree, key=lambda path: -_chance(path, rates))
    return _by_depth(best[: paying([_chance(path, rates) for path in best], plan)])


def _by_depth(paths: Sequence[tuple[int, ...]]) -> Tree:
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


@cache
def likely_tree(nodes: int, depth: int, rates: Rates = ()) -> Tree:
    """The `nodes` likeliest paths: best-first by path product, optimal for every budget."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-_chance((0,), rates), (0,))]
    tree: list[tuple[int, ...]] = []
    while len(tree) < nodes:
        _, path = heapq.heappop(heap)
        tree.append(path)
        for new in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(new) <= depth:
                heapq.heappush(heap, (-_chance(new, rates), new))
    return _by_depth(tree)


def _chance(path: tuple[int, ...], rates: Rates) -> float:
    """How often all of `path` is accepted."""
    chance = 1.0
    for depth, rank in enumerate(path):
        first = rates[depth] if depth < len(rates) else FIRST
        chance *= min(first, 1 - first) * FURTHER**rank if rank else first
    return chance


@cache
def tree_chances(tree: Tree, rates: Rates = ()) -> list[float]:
    """How often the root and the nodes of `tree` are accepted."""
    return [1.0, *(_chance(path, rates) for path in tree)]


def first_rates(accepted: Sequence[float | None]) -> Rates:
    """`Rates` from how often the first 1, 2, .. tokens of a drawn chain are all accepted.

    Args:
        accepted: None at a depth where that is not known.
    """
    rates, before = [], 1.0
    for share in accepted:
        # Shares are means over rows of their own, so one may exceed the one before by a little.
        rates.append(min(1.0, share / before) if share is not None and before else FIRST)
        before = share or 0.0
    return tuple(rates)


def check_tree(tree: Tree) -> None:
    """Raises ValueError unless each node's parent and earlier siblings are in `tree`, once."""
    known = set(tree)
    if len(known) < len(tree):
        raise ValueError("a node is listed twice")
    for path in tree:
        if not path or min(path) < 0:
            raise ValueError(f"{path} is no path of child ranks")
        *above, rank = path
        if above and tuple(above) not in known:
            raise ValueError(f"node {path} has no parent in the tree")
        if rank and (*above, rank - 1) not in known:
            raise ValueError(f"node {path} has no sibling of rank {rank - 1} before it")


@cache
def tree_levels(tree: Tree) -> list[list[tuple[int, int]]]:
    """For each level, (place of the parent in the level above, rank) of its nodes."""
    levels: list[list[tuple[int, int]]] = []
    above: dict[tuple[int, ...], int] = {(): 0}
    for depth in range(1, max(map(len, tree)) + 1):
        paths = [path for path in tree if len(path) == depth]
        levels.append([(above[path[:-1]], path[-1]) for path in paths])
        above = {path: place for place, path in enumerate(paths)}
    return levels


def paying(chances: Sequence[float], plan: Plan) -> int:
    """How many nodes to keep of those with `chances`, the likeliest first: those of `plan.worth` at
    least, at `plan.nodes` most."""
    kept, least = chances[: plan.nodes], plan.worth * (1 - ROUNDING)
    return next((n for n, chance in enumerate(kept) if chance < least), len(kept))
