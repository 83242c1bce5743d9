"""Fixed shapes of draft trees: which are asked for, and what their nodes are worth."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cache

from .draft import Plan, Tree

RATES = 0.5, 0.4
"""What is assumed of a shape: how often a first child is accepted, and the share of that which each
further child has of the one before."""


def planned_tree(plan: Plan, depth: int, trees: bool) -> Tree:
    """The fixed shape that `plan` asks for, nodes in the order of their depth.

    Args:
        depth: levels at most.
        trees: False for a head that can only draft chains.
    """
    if trees and plan.tree is not None:
        tree = _by_depth([path for path in plan.tree if len(path) <= depth])
    elif trees and plan.nodes is not None:
        tree = likely_tree(plan.nodes, depth)
    else:
        tree = tuple((0,) * length for length in range(1, depth + 1))
    tree = tree[: plan.nodes]
    # What does not pay by the shape's own rates is not grown at all.
    best = sorted(tree, key=lambda path: -_rate(path))
    return _by_depth(best[: paying([math.exp(_rate(path)) for path in best], plan)])


def _by_depth(paths: Sequence[tuple[int, ...]]) -> Tree:
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


@cache
def likely_tree(nodes: int, depth: int) -> Tree:
    """The `nodes` likeliest paths at the acceptance `RATES`: best-first by path product, which is
    optimal for every budget."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-_rate((0,)), (0,))]
    tree: list[tuple[int, ...]] = []
    while len(tree) < nodes:
        _, path = heapq.heappop(heap)
        tree.append(path)
        for new in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(new) <= depth:
                heapq.heappush(heap, (-_rate(new), new))
    return _by_depth(tree)


def _rate(path: tuple[int, ...]) -> float:
    """Log of how often all of `path` is accepted, at the acceptance `RATES`."""
    first, share = RATES
    return len(path) * math.log(first) + sum(path) * math.log(share)


@cache
def tree_worth(tree: Tree) -> list[float]:
    """`_rate` of the root and of the nodes of `tree`."""
    return [0.0, *map(_rate, tree)]


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
    kept = chances[: plan.nodes]
    return next((n for n, chance in enumerate(kept) if chance < plan.worth), len(kept))
