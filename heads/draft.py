"""Draft: the tokens proposed for one round, one tree a row.  Plan: what a drafter is asked for.

Shape suffixes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """What a drafter is asked for in one round.

    Attributes:
        depth: longest path below the root, in tokens; 0 asks for plain decoding.
    """

    depth: int = 4

    def capped(self, depth: int) -> Plan:
        """The same plan, no deeper than `depth` (never below 0)."""
        return Plan(depth=max(0, min(self.depth, depth)))


@dataclass
class Draft:
    """One tree of proposed tokens a row; node 0 is the root, the last committed token.

    Attributes:
        ids_BN: token of each node, target ids.
        parent_BN: index of each node's parent, parents before children; -1 at the root.
            Siblings stand in the order in which they are tried: points first.
        drawn_BN: False for a point proposal (chosen without chance), True for a token drawn
            without replacement from its parent's law.
        q_BNV: the law from which the drawn children of each node came; None when all are points.
        valid_BN: prefix mask; rows of a batch may hold fewer nodes than N.
    """

    ids_BN: Tensor
    parent_BN: Tensor
    drawn_BN: Tensor
    valid_BN: Tensor
    q_BNV: Tensor | None = None
    _parents: list[list[int]] | None = field(default=None, repr=False)

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

    @property
    def parents(self) -> list[list[int]]:
        """The valid nodes' parents as lists, row by row (one transfer, then kept)."""
        if self._parents is None:
            counts = self.valid_BN.sum(1).tolist()
            self._parents = [
                row[:n] for row, n in zip(self.parent_BN.tolist(), counts, strict=True)
            ]
        return self._parents

    def depths(self) -> list[list[int]]:
        """Depth of each valid node, the root's being 0."""
        result = []
        for parents in self.parents:
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            result.append(depths)
        return result

    def children(self) -> list[list[list[int]]]:
        """Children of each valid node in the order in which they are tried."""
        result = []
        for parents in self.parents:
            children: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents[1:], start=1):
                children[parent].append(node)
            result.append(children)
        return result

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root (included) to `node` (included)."""
        parents, path = self.parents[row], [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return path[::-1]

    def shortened(self, room: list[int]) -> Draft:
        """Each row up to its first node deeper than `room` allows, so that what a row drafts does
        not depend on the rows beside it."""
        counts = [
            next((n for n, depth in enumerate(depths) if depth > most), len(depths))
            for depths, most in zip(self.depths(), room, strict=True)
        ]
        if counts == [len(parents) for parents in self.parents]:
            return self
        nodes = torch.arange(self.ids_BN.shape[1])
        valid_BN = nodes < torch.tensor(counts)[:, None]
        return replace(self, valid_BN=valid_BN, _parents=None)

    def is_chain(self) -> bool:
        """True when every row is a single path."""
        return all(p == list(range(-1, len(p) - 1)) for p in self.parents)

    def ancestors(self) -> Tensor:
        """`[B, N, N]` bool on the CPU: entry (n, m) says that node n may look at node m, which is
        itself or one of its ancestors.  Nodes past a row's end look at themselves alone."""
        rows, nodes = self.ids_BN.shape
        if self.is_chain() and bool(self.valid_BN.all()):
            return torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, nodes, nodes)
        mask = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate(parents[1:], start=1):
                mask[row, node] |= mask[row, parent]
        return mask
