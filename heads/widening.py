"""A draft vocabulary widened, row by row, by the ids of the row's own prompt and output.

A head that draws on the target's frozen lm_head needs no training for a particular vocabulary: the
lm_head's rows of a text's further ids are gathered at the prefill, and all of them again whenever a
round brings a new one.  Drafts are chosen or drawn from one law over both parts, which is the law
that the verifier is given.

Shape suffixes: B rows, T and M tokens, L nodes of a level, k tokens of a path, E further ids, W
hidden width, D draft vocabulary, further ids included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .draft import padded
from .shapes import Rates

if TYPE_CHECKING:
    from .base import Head


@dataclass(frozen=True)
class Widened:
    """A head's state with the further ids of its rows; drafts grow from it as from the head.

    Attributes:
        inner: the head's own state.
        further: of each row, in the order in which they were met.
        draft_ids: [B, D] target ids of the columns of the logits; id 0 stands behind a row's own.
        project: states [B, L, W] -> logits [B, L, E] of the further ids, -inf behind a row's own;
            None where no row has any.
    """

    head: Head
    inner: Any
    further: list[list[int]]
    draft_ids: Tensor
    project: Callable[[Tensor], Tensor] | None

    @classmethod
    def start(cls, head: Head, inner: Any, ids_BT: Tensor, length_B: Tensor) -> Widened:
        """After the prefill, of whose rows `ids_BT` holds `length_B` ids."""
        return cls._of(head, inner, _with_new(head, [[] for _ in ids_BT], ids_BT, length_B))

    def advanced(self, inner: Any, committed_BM: Tensor, count_B: Tensor) -> Widened:
        """After a round, with the head's own state after it."""
        further = _with_new(self.head, self.further, committed_BM, count_B)
        if further == self.further:
            return replace(self, inner=inner)
        return self._of(self.head, inner, further)

    def select(self, rows: Tensor) -> Widened:
        """The state of `rows` alone."""
        further = [self.further[row] for row in rows.tolist()]
        return self._of(self.head, self.inner.select(rows), further)

    @classmethod
    def _of(cls, head: Head, inner: Any, further: list[list[int]]) -> Widened:
        """Gathers the lm_head's rows of `further`."""
        assert head.draft_ids is not None
        ids_BD = head.draft_ids.expand(len(further), -1)
        if not any(further):
            return cls(head, inner, further, ids_BD, None)
        ids_BE, counts = padded(further, 0), torch.tensor([[len(ids)] for ids in further])
        behind_B1E = (torch.arange(ids_BE.shape[1]) >= counts)[:, None].to(ids_BD.device)
        ids_BE = ids_BE.to(ids_BD.device)
        lm_head = head.spec.projector(ids_BE, False)

        def project(hidden_BLW: Tensor) -> Tensor:
            return lm_head(hidden_BLW).masked_fill(behind_B1E, -torch.inf)

        return cls(head, inner, further, torch.cat([ids_BD, ids_BE], 1), project)

    # -- what drafts grow from -------------------------------------------------------------------

    @property
    def spec(self) -> Any:
        """The target."""
        return self.head.spec

    @property
    def max_depth(self) -> int:
        """See `Head`."""
        return self.head.max_depth

    @property
    def trees(self) -> bool:
        """See `Head`."""
        return self.head.trees

    @property
    def sharpness(self) -> list[float] | None:
        """See `Head`."""
        return self.head.sharpness

    @property
    def rates(self) -> Rates:
        """See `Grower`."""
        return self.head.rates

    def step(
        self, state: Any, paths_BLk: Tensor, place_BL: Tensor, memo: dict[str, Tensor]
    ) -> Tensor:
        """See `Head.step`."""
        return self.head.step(state, paths_BLk, place_BL, memo)

    def draft_logits(self, hidden: Tensor, paths: Tensor) -> Tensor:
        """Logits [B, L, D]; a prior says nothing about further ids."""
        logits = self.head.draft_logits(hidden, paths)
        return logits if self.project is None else torch.cat([logits, self.project(hidden)], -1)


def _with_new(
    head: Head, further: list[list[int]], ids_BT: Tensor, count_B: Tensor
) -> list[list[int]]:
    """The further ids of each row and those that are new among its next `count_B` ones."""
    assert head.draft_ids is not None
    outside_BT = (~torch.isin(ids_BT, head.draft_ids)).tolist()
    rows = zip(further, ids_BT.tolist(), outside_BT, count_B.tolist(), strict=True)
    result = []
    for known, ids, outside, count in rows:
        new = [i for i, out in zip(ids[:count], outside, strict=False) if out]
        result.append(list(dict.fromkeys([*known, *new])) if new else known)
    return result
