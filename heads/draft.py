"""Draft: the tokens proposed for one round, one tree a row.  Plan: what a drafter is asked for.

Shape suffixes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Tree = tuple[tuple[int, ...], ...]
"""A fixed shape: a node is the path of ranks that leads to it, (0,) being the root's first child,
(0, 1) that child's second one (the form of Medusa's choices)."""


ROOT = 1.5
"""What a further row's root adds to a forward, in units of `Plan.worth`.  It reads keys and values
of its own: with SmolLM2-135M on two CPU cores it takes 13 ms where a node takes 5.4, and `worth` is
a node's cost times a speedup of 1.6."""


@dataclass(frozen=True)
class Plan:
    """What a drafter is asked for in one round.

    Attributes:
        depth: longest path below the root, in tokens; 0 asks for plain decoding.
        nodes: nodes below the root at most.  Where tokens are chosen, a tree of that size is grown
            best-first; where they are drawn, a tree of fixed shape.  None for one chain.
        tree: a fixed shape instead, no deeper than `depth`.
        confidence: a node whose path has less than this probability gets no children.
        worth: nodes that are less likely than this to be accepted are left out; 0 keeps all.  In a
            round of time T that gives E tokens a node pays where chance >= (dT / T) E, dT being the
            time that it adds: elsewhere that would bring (dT / T) E tokens.
        tokens: what one forward may read, over all rows of a batch; leaves each row an equal share
            of nodes (without `nodes`, of each drafter's own chain).  None for no bound.
    """

    depth: int = 4
    nodes: int | None = None
    tree: Tree | None = None
    confidence: float = 0.0
    worth: float = 0.0
    tokens: int | None = None

    def capped(self, depth: int) -> Plan:
        """The same plan, no deeper than `depth` (never below 0)."""
        return replace(self, depth=max(0, min(self.depth, depth)))

    def priced(self, rows: int) -> Plan:
        """The plan with `worth` risen to what a node of every row costs beside `rows` roots."""
        others = (rows - 1) * min(1.0, ROOT * self.worth)
        return replace(self, worth=rows * self.worth / (1 + others))

    def shared(self, rows: int) -> Plan:
        """The plan of each of `rows` rows, `tokens` divided among them.  A share that is smaller
        than the tree cuts the tree; a chain is shortened."""
        if self.tokens is None or self.depth == 0:
            return self
        share = max(0, self.tokens // rows - 1)
        if self.nodes is not None or self.tree is not None:
            nodes = share if self.nodes is None else min(self.nodes, share)
            return replace(self, nodes=nodes, depth=self.depth if nodes else 0)
        return self.capped(share)


@dataclass
class Draft:
    """One tree of proposed tokens a row; node 0 is the root, the last committed token.  Nodes stand
    in the order of their depth.

    Attributes:
        ids_BN: token of each node, target ids.
        parent_BN: index of each node's parent, parents before children; -1 at the root.
            Siblings stand in the order in which they are tried: points first.
        drawn_BN: False for a point proposal (chosen without chance), True for a token drawn
            without replacement from its parent's law.
        valid_BN: prefix mask; rows of a batch may hold fewer nodes than N.
        q_BNV: the law from which the drawn children of each node came; None when all are points.
        chances: for each row and valid node, how likely its whole path is to be accepted, as the
            drafter estimates it; None where it does not.  Of drawn nodes an assumption of the
            tree's shape, the same whatever was drawn.
        names: drafters that took part, where there are several.
        sources: for each row and valid node, which of `names` proposed it, as bits.
    """

    ids_BN: Tensor
    parent_BN: Tensor
    drawn_BN: Tensor
    valid_BN: Tensor
    q_BNV: Tensor | None = None
    chances: list[list[float]] | None = None
    names: tuple[str, ...] = ()
    sources: list[list[int]] | None = None

    @classmethod
    def root(cls, root_B: Tensor) -> Draft:
        """The empty draft: every row holds its root alone, which is plain decoding."""
        return cls.chain(root_B[:, None])

    @classmethod
    def chain(
        cls, ids_BN: Tensor, q_BNV: Tensor | None = None, valid_BN: Tensor | None = None
    ) -> Draft:
        """A chain: node n is the child of node n-1.

        Args:
            ids_BN: the root and the drafted tokens.
            q_BNV: law from which node n+1 was drawn, at n; None for point proposals.
            valid_BN: prefix mask; all nodes when None.
        """
        rows, nodes = ids_BN.shape
        parents = torch.arange(-1, nodes - 1).expand(rows, nodes)
        drawn = torch.full((rows, nodes), q_BNV is not None)
        drawn[:, 0] = False
        valid = torch.ones(rows, nodes, dtype=torch.bool) if valid_BN is None else valid_BN
        return cls(ids_BN, parents, drawn, valid, q_BNV)

    @classmethod
    def points(
        cls,
        ids: list[list[int]],
        parents: list[list[int]],
        device: torch.device | None = None,
        chances: list[list[float]] | None = None,
    ) -> Draft:
        """Point proposals from lists, a row each, the root first."""
        ids_BN, parent_BN = padded(ids, 0, device), padded(parents, 0)
        counts_B1 = torch.tensor([[len(row)] for row in ids])
        valid_BN = torch.arange(ids_BN.shape[1]) < counts_B1
        draft = cls(ids_BN, parent_BN, torch.zeros_like(valid_BN), valid_BN, chances=chances)
        draft.tokens, draft.parents = ids, parents  # known here, so never fetched
        return draft

    @cached_property
    def parents(self) -> list[list[int]]:
        """The valid nodes' parents as lists, row by row (one transfer, then kept)."""
        counts = self.valid_BN.sum(1).tolist()
        return [row[:n] for row, n in zip(self.parent_BN.tolist(), counts, strict=True)]

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The valid nodes' ids as lists, row by row (one transfer, then kept)."""
        rows = zip(self.ids_BN.tolist(), self.parents, strict=True)
        return [ids[: len(parents)] for ids, parents in rows]

    @cached_property
    def depths(self) -> list[list[int]]:
        """Depth of each valid node, the root's being 0."""
        result = []
        for parents in self.parents:
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            result.append(depths)
        return result

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """Children of each valid node in the order in which they are tried."""
        result = []
        for parents in self.parents:
            children: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents[1:], start=1):
                children[parent].append(node)
            result.append(children)
        return result

    @cached_property
    def is_chain(self) -> bool:
        """True when every row is a single path."""
        return all(p == list(range(-1, len(p) - 1)) for p in self.parents)

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root (included) to `node` (included)."""
        parents, path = self.parents[row], [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return path[::-1]

    def shortened(self, room: list[int]) -> Draft:
        """Each row without the nodes deeper than `room` allows, so that what a row drafts does not
        depend on the rows beside it."""
        counts = [
            sum(depth <= most for depth in depths)
            for depths, most in zip(self.depths, room, strict=True)
        ]
        if counts == [len(parents) for parents in self.parents]:
            return self
        # A prefix, since nodes stand in the order of their depth.
        valid_BN = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        kept = ("ids_BN", "parent_BN", "drawn_BN", "q_BNV")
        parts = {name: getattr(self, name) for name in kept}
        cut = {name: part[:, : max(counts)] for name, part in parts.items() if part is not None}
        for name in ("chances", "sources"):
            if (rows := getattr(self, name)) is not None:
                cut[name] = [row[:n] for row, n in zip(rows, counts, strict=True)]
        return replace(self, valid_BN=valid_BN, **cut)

    def ancestors(self) -> Tensor:
        """`[B, N, N]` bool on the CPU: entry (n, m) says that node n may look at node m, which is
        itself or one of its ancestors.  Nodes past a row's end look at themselves alone."""
        rows, nodes = self.ids_BN.shape
        if self.is_chain and bool(self.valid_BN.all()):
            return torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, nodes, nodes)
        mask = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate(parents[1:], start=1):
                mask[row, node] |= mask[row, parent]
        return mask

    def depth_BN(self) -> Tensor:
        """Depth of each node on the CPU, 0 past a row's end."""
        return padded(self.depths, 0, width=self.ids_BN.shape[1])


def padded(
    rows: Sequence[Sequence[int]],
    fill: int,
    device: torch.device | None = None,
    width: int | None = None,
) -> Tensor:
    """[B, width] lists of unlike length, filled up on the right."""
    longest = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], device=device)
