"""Sums of an objective over loss rows, in chunks, so that no tensor of all rows' logits exists.

Shape suffixes: B rows, T tokens, M loss rows, W hidden width, R own features, D draft vocabulary, S
factors, K depths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import objectives
from .calibration import top_chances
from .objectives import Laws, Objective, Project, TargetLaws, wide


class Statistics(NamedTuple):
    """Of loss rows, each by itself; None where nobody asks.

    Attributes:
        loss_M: what the objective makes of the row, the accepted length aside.
        ratio_M: min(1, q(x) / p(x)) of the text's token x.
        alpha_M: sum min(p, q), the chance that a token drawn from q is accepted.
        chance_SM: see `calibration.top_chances`.
    """

    loss_M: Tensor
    ratio_M: Tensor | None = None
    alpha_M: Tensor | None = None
    chance_SM: Tensor | None = None


@dataclass(frozen=True)
class _Rows:
    """The loss rows of all depths end to end, and where their laws come from.

    Attributes:
        at: for each depth its flat positions, of `positions` in all.
        hit_M: filled as the rows are visited: is the draft's argmax the token of the text?
        learning: gradients are wanted, in this visit or a later one.
        acceptance: ratio and alpha are asked for.
    """

    objective: Objective
    at: list[Tensor]
    positions: int
    depth_M: Tensor
    teacher_M: Tensor
    label_M: Tensor
    hit_M: Tensor
    target: TargetLaws
    learning: bool
    acceptance: bool

    def chunks(self) -> tuple[Tensor, ...]:
        """Rows [m] that are computed together.  Those of unlike depth that share a teacher stand
        together, so that its law is computed once."""
        width = self.target.project(self.target.hidden[:1]).shape[-1]
        # The acceptance keeps about twice as many tensors of a chunk alive.
        elements = objectives.CHUNK // 2 if self.acceptance else objectives.CHUNK
        return self.teacher_M.argsort(stable=True).split(max(1, elements // width))

    def statistics(self, rows_M: Tensor, *inputs: Tensor) -> Statistics:
        """Of the rows of a chunk; inputs: their states [M, W] and the own weights of each depth."""
        logits_MD, label_M = wide(self._logits(rows_M, *inputs)), self.label_M[rows_M]
        self.hit_M[rows_M] = logits_MD.detach().argmax(-1) == label_M
        laws = Laws(logits_MD, self.target, self.teacher_M[rows_M], label_M)
        return Statistics(
            self.objective.rows(laws),
            laws.log_ratio_M.exp() if self.acceptance else None,
            laws.log_acceptance_M.exp() if self.acceptance else None,
            None if self.learning else top_chances(logits_MD),
        )

    def _logits(self, rows_M: Tensor, states_MW: Tensor, *weights: Tensor) -> Tensor:
        if not weights:
            return self.target.project(states_MW)
        shared_MW, own_MR = states_MW.tensor_split([states_MW.shape[1] - weights[0].shape[1]], 1)
        # Each depth through its own weights, and back into the order of the rows.
        depth_M = self.depth_M[rows_M]
        order_M = depth_M.argsort(stable=True)
        parts = own_MR[order_M].split(depth_M.bincount(minlength=len(weights)).tolist())
        logits = [functional.linear(s, w) for s, w in zip(parts, weights, strict=True)]
        logits_MD = torch.cat(logits)[order_M.argsort()]
        return self.target.project(shared_MW) + logits_MD if shared_MW.shape[1] else logits_MD

    def by_depth(self, value: Tensor) -> Tensor:
        """Values [.., M] of rows -> sums [.., K] over the rows of each depth."""
        parts = value.split([len(r) for r in self.at], -1)
        return torch.stack([part.sum(-1) for part in parts], -1)


def _visit(
    rows: _Rows, inputs: Sequence[Tensor], total: Callable[..., Tensor] | None = None
) -> tuple[Statistics, list[Tensor]]:
    """Statistics of all rows, a chunk at a time.

    Args:
        inputs: states [M, W], and the own weights of each depth if any.
        total: (statistics of a chunk, its rows) -> what gradients are wanted of; None: of nothing.
    Returns:
        the statistics, and the gradients of the sum of all totals by `inputs`, taken while a
        chunk's logits exist.
    """
    wanted, chunks = total is not None, rows.chunks()
    grads = [torch.zeros_like(t) for t in inputs] if wanted else []
    found: list[list[Any]] = []
    for rows_M in chunks:
        own = [t.detach().requires_grad_(wanted) for t in (inputs[0][rows_M], *inputs[1:])]
        with torch.set_grad_enabled(wanted):
            part = rows.statistics(rows_M, *own)
            value = None if total is None else total(part, rows_M)
        found.append([t if t is None else t.detach() for t in part])
        if value is not None:
            grads[0][rows_M], *others = torch.autograd.grad(value, own)
            for grad, other in zip(grads[1:], others, strict=True):
                grad += other
    order_M = torch.cat(chunks).argsort()
    joined = (
        part[0] if part[0] is None else torch.cat(part, -1)[..., order_M]
        for part in zip(*found, strict=True)
    )
    return Statistics._make(joined), grads


class _LossSums(torch.autograd.Function):
    """[K] sums of the rows' losses.  One pass gives value and gradient, since a depth's rows all
    weigh the same, whatever is made of the sums."""

    @staticmethod
    def forward(ctx, rows, *inputs):  # type: ignore[no-untyped-def]
        found, grads = _visit(rows, inputs, lambda part, rows_M: part.loss_M.sum())
        ctx.depth_M = rows.depth_M
        ctx.save_for_backward(*grads)
        return rows.by_depth(found.loss_M)

    @staticmethod
    def backward(ctx, grad_K):  # type: ignore[no-untyped-def]
        states_MW, *weights = ctx.saved_tensors
        states_MW = states_MW * grad_K[ctx.depth_M, None].to(states_MW.dtype)
        weights = [w * grad_K[depth].to(w.dtype) for depth, w in enumerate(weights)]
        return None, states_MW, *weights


class _Coupled(torch.autograd.Function):
    """Loss, ratio and alpha [M] of the rows.  What weighs a row of one depth is known only once the
    row's other depths are, so the backward visits the rows again."""

    @staticmethod
    def forward(ctx, rows, *inputs):  # type: ignore[no-untyped-def]
        ctx.rows, kind = rows, inputs[0].device.type
        ctx.autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )
        ctx.save_for_backward(*inputs)
        found, _ = _visit(rows, inputs)
        return found.loss_M, found.ratio_M, found.alpha_M

    @staticmethod
    def backward(ctx, loss_M, ratio_M, alpha_M):  # type: ignore[no-untyped-def]
        def total(part, rows_M):  # type: ignore[no-untyped-def]
            weighed_M = part.loss_M * loss_M[rows_M] + part.ratio_M * ratio_M[rows_M]
            return (weighed_M + part.alpha_M * alpha_M[rows_M]).sum()

        with ctx.autocast:
            return None, *_visit(ctx.rows, ctx.saved_tensors, total)[1]


def distil(
    objective: Objective,
    states: list[Tensor],
    rows: list[Tensor],
    *,
    hidden: Tensor,
    ids: Tensor,
    project: Project,
    weights: list[Tensor] | None,
    draft_ids: Tensor | None,
    project_all: Project | None = None,
    log_z: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums of `objective` over loss rows, and how often drafts are right.

    Args:
        states: for each depth k, draft states [M_k, W]: what `project` reads, then what the depth's
            own weights read.
        rows: for each depth k, flat positions t [M_k]; teacher hidden[t + k], label ids[t + 1 + k].
        hidden, ids: target states and tokens, flat over batch and time.
        project: states to draft-vocabulary logits with the target's frozen lm_head.
        weights: own weights of each depth [D, R] for the last R features of its states, added to
            what `project` makes of the others, if any; None: `project` reads all.
        draft_ids: of the draft vocabulary, sorted; None for all.
        project_all: to logits over all ids; beside `draft_ids`, no acceptance without it.
        log_z: of these logits at every position, flat, where it is known: see `normalisers`.
    Returns:
        loss, top1, prefix [K]: see `Head.forward`; in evaluation, or where the objective needs it,
        accepted [K]: sums of P(drafts 1..k are all accepted); in evaluation also chance [S, K].
    Raises:
        TypeError: an objective that is an acceptance, which is not known.
    """
    known, learning = draft_ids is None or project_all is not None, torch.is_grad_enabled()
    if objective.is_acceptance and not known:
        raise TypeError("an acceptance over a draft vocabulary needs distil's project_all")
    teacher_M = torch.cat([r + k for k, r in enumerate(rows, start=1)])
    label_M = draft_index(ids[teacher_M + 1], draft_ids)
    whole = None if draft_ids is None else project_all
    all_rows = _Rows(
        objective,
        at=rows,
        positions=len(ids),
        depth_M=torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)]),
        teacher_M=teacher_M,
        label_M=label_M,
        hit_M=torch.zeros_like(label_M, dtype=torch.bool),
        target=TargetLaws(hidden, teacher_M.unique(), project, whole, log_z),
        learning=learning,
        acceptance=objective.accepted > 0 if learning else known,
    )
    inputs = torch.cat(states), *(weights or [])
    if not learning:
        sums = _sums(all_rows, _visit(all_rows, inputs)[0])
    elif all_rows.acceptance:
        sums = _sums(all_rows, Statistics(*_Coupled.apply(all_rows, *inputs)))
    else:
        sums = {"loss": _LossSums.apply(all_rows, *inputs)}
    return sums | _hits(all_rows)


def _sums(rows: _Rows, found: Statistics) -> dict[str, Tensor]:
    """Sums by depth of the loss, of what is accepted and of the chances, where these are known."""
    sums, loss_M = {}, found.loss_M
    if found.chance_SM is not None:
        sums["chance"] = rows.by_depth(found.chance_SM)
    if found.ratio_M is not None and found.alpha_M is not None:
        accepted_M = _accepted(rows, found.ratio_M, found.alpha_M)
        sums["accepted"] = rows.by_depth(accepted_M.detach())
        loss_M = loss_M + rows.objective.accepted * (1 - accepted_M)
    return sums | {"loss": rows.by_depth(loss_M)}


def _accepted(rows: _Rows, ratio_M: Tensor, alpha_M: Tensor) -> Tensor:
    """[M] P(drafts 1..k are all accepted), estimated from the text x ~ p of each row:

        prod_{i<k} min(1, q_i(x_i) / p_i(x_i)) * alpha_k.

    Its mean over text of the target is exact, since E_{x~p}[min(1, q/p)] runs over the drafts
    x ~ q that are accepted (arXiv 2211.17192, theorem 3.5), each on its own prefix; the sum over
    k is the expected number of accepted tokens.  (A product of mean alphas is not: depths depend
    on each other.)  A token outside the draft vocabulary has ratio 0.
    """
    reached = products(ratio_M, rows.at, rows.positions)
    return alpha_M * torch.cat([before[r] for before, r in zip(reached, rows.at, strict=False)])


def _hits(rows: _Rows) -> dict[str, Tensor]:
    """top1 and prefix sums by depth from the hits of all rows, which have been visited."""
    prefix = torch.stack(products(rows.hit_M, rows.at, rows.positions)[1:]).sum(1)
    return {"top1": rows.by_depth(rows.hit_M), "prefix": prefix}


def products(value_M: Tensor, rows: list[Tensor], positions: int) -> list[Tensor]:
    """[positions] for each k = 0..K: the product of the values of depths 1..k at a position (of
    truth values: are all of them true?), 0 where one of these depths has no row there."""
    found = [value_M.new_ones(positions)]
    for r, value in zip(rows, value_M.split([len(r) for r in rows]), strict=True):
        found.append(found[-1] * torch.zeros_like(found[-1]).index_put((r,), value))
    return found


def draft_index(ids: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Index of each target id in the sorted `draft_ids`, -1 where it is absent."""
    if draft_ids is None:
        return ids
    index = torch.searchsorted(draft_ids, ids).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[index] == ids, index, -1)


def loss_rows(batch: dict[str, Tensor], depth: int) -> list[Tensor]:
    """Flat indices b*T+t of the rows that depth k = 1..depth learns from.

    Row t counts at depth k when the target generated all of x_{t+1}, .., x_{t+1+k} (the weight
    prod_{j=1..k+1} a_{t+j}), in one document; so the first row is the last prompt token.
    """
    mask, document = batch["loss_mask"], batch.get("document")
    alive = torch.ones_like(mask)
    result = []
    for shift in range(1, depth + 2):
        here = torch.zeros_like(mask)
        here[:, :-shift] = mask[:, shift:]
        if document is not None:
            here[:, :-shift] &= document[:, :-shift] == document[:, shift:]
        alive = alive & here
        if shift > 1:
            result.append(alive.flatten().nonzero()[:, 0])
    return result
