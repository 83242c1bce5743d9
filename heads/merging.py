"""Several drafts of the same roots as one tree: heads and n-grams are right at different places.

Shape suffixes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .draft import Draft, Plan, padded
from .shapes import paying


@dataclass
class _Node:
    """A node of a merged row.

    Attributes:
        missed: how often, by the drafts' own estimates, all that propose it here are wrong.
        chance: of its whole path.
        origin: its node in the draft that draws; 0 where it has none.
    """

    token: int
    parent: int
    depth: int
    drawn: bool = False
    sources: int = 0
    origin: int = 0
    missed: float = 1.0
    chance: float = 1.0


def merge(drafts: Sequence[Draft], names: Sequence[str], plan: Plan) -> Draft:
    """Joins drafts into one tree, and keeps of each row the nodes that pay.

    Equal points of one parent become one node.  A drawn node stays beside an equal point: to drop
    it would depend on chance, and bias the output.  What is kept depends on the drafts' estimates
    alone, which for drawn nodes are those of a fixed shape.

    Args:
        drafts: earlier ones' points are tried first; one at most may hold drawn tokens, so that no
            node has two laws.
        names: their drafters', for statistics.
        plan: its `nodes` and `worth` say what is kept.
    Raises:
        ValueError: two drafts with drawn tokens.
    """
    drawing = [i for i, draft in enumerate(drafts) if draft.q_BNV is not None]
    if len(drawing) > 1:
        raise ValueError("at most one of the merged drafts may hold drawn tokens")
    rows = [_kept(_joined(drafts, row), plan) for row in range(len(drafts[0].ids_BN))]
    device = drafts[0].ids_BN.device
    ids = [[node.token for node in row] for row in rows]
    merged = Draft.points(ids, [[node.parent for node in row] for row in rows], device)
    merged.names = tuple(names)
    merged.sources = [[node.sources for node in row] for row in rows]
    if drawing:
        merged.drawn_BN = padded([[node.drawn for node in row] for row in rows], False)
        origin_BN = padded([[node.origin for node in row] for row in rows], 0, device)
        law_BNV = drafts[drawing[0]].q_BNV
        assert law_BNV is not None
        merged.q_BNV = law_BNV[torch.arange(len(rows), device=device)[:, None], origin_BN]
    return merged


def _joined(drafts: Sequence[Draft], row: int) -> list[_Node]:
    """All nodes of one row, parents before children, with the chance of each path."""
    merged = [_Node(drafts[0].tokens[row][0], -1, 0)]
    points: dict[tuple[int, int], int] = {}
    for index, draft in enumerate(drafts):
        tokens, parents, place = draft.tokens[row], draft.parents[row], [0]
        drawn = draft.drawn_BN[row].tolist()
        chances = draft.chances[row] if draft.chances else [1.0] * len(tokens)
        for node in range(1, len(tokens)):
            parent = place[parents[node]]
            known = None if drawn[node] else points.get((parent, tokens[node]))
            if known is None:
                known = len(merged)
                merged.append(_Node(tokens[node], parent, merged[parent].depth + 1, drawn[node]))
                if not drawn[node]:
                    points[parent, tokens[node]] = known
            place.append(known)
            merged[known].missed *= 1 - chances[node] / (chances[parents[node]] or 1.0)
            merged[known].sources |= 1 << index
            if draft.q_BNV is not None:
                merged[known].origin = node
    _estimate(merged)
    return merged


def _estimate(nodes: list[_Node]) -> None:
    """The chance of each path: drafts that agree are wrong together as if independent; siblings
    that promise more than their parent share what it has."""
    promised = [0.0] * len(nodes)
    for node in nodes[1:]:
        promised[node.parent] += 1 - node.missed
    for node in nodes[1:]:
        share = (1 - node.missed) / max(1.0, promised[node.parent])
        node.chance = nodes[node.parent].chance * share


def _kept(nodes: list[_Node], plan: Plan) -> list[_Node]:
    """The nodes that pay, in the order of depth, points before drawn ones."""
    # Stable, so that of a parent and a child with equal chances the parent is taken.
    best = sorted(range(1, len(nodes)), key=lambda n: -nodes[n].chance)
    count = paying([nodes[n].chance for n in best], plan)
    kept = sorted([0, *best[:count]], key=lambda n: (nodes[n].depth, nodes[n].drawn, n))
    place = {old: new for new, old in enumerate(kept)}
    return [replace(nodes[n], parent=place.get(nodes[n].parent, -1)) for n in kept]
