"""Sums of an objective over loss rows, in chunks, so that no tensor of all rows' logits exists.

Shape suffixes: B rows, T tokens, M loss rows of all depths, U distinct teachers of a chunk, W
hidden width, D draft vocabulary, S statistics of a row, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from . import objectives
from .objectives import Laws, Objective, Project, TargetLaws, wide


@dataclass(frozen=True)
class _Rows:
    """The loss rows of all depths end to end, and where their laws come from.

    Attributes:
        hit_M: filled as the rows are visited: is the draft's argmax the token of the text?
    """

    objective: Objective
    depth_M: Tensor
    teacher_M: Tensor
    label_M: Tensor
    hit_M: Tensor
    hidden: Tensor
    project: Project
    project_all: Project | None
    draft_ids: Tensor | None

    def chunks(self) -> tuple[Tensor, ...]:
        """Rows [m] that are computed together.  Those of unlike depth that share a teacher stand
        together, so that its law is computed once."""
        known = self.draft_ids is not None
        width = len(self.draft_ids) if known else self.project(self.hidden[:1]).shape[-1]
        return self.teacher_M.argsort(stable=True).split(max(1, objectives.CHUNK // width))

    def statistics(self, acceptance: bool, rows_M: Tensor, *inputs: Tensor) -> Tensor:
        """Of each row of a chunk: its loss and, for `acceptance`, min(1, q(x)/p(x)) and alpha.

        Args:
            inputs: states [M, W] of these rows, and the own lm_head [D, W] of each depth if any.
        Returns:
            [S, M].
        """
        teachers_U, place_M = self.teacher_M[rows_M].unique_consecutive(return_inverse=True)
        target = TargetLaws(self.hidden[teachers_U], self.project, self.project_all)
        logits_MD = wide(self._logits(rows_M, *inputs))
        self.hit_M[rows_M] = logits_MD.detach().argmax(-1) == self.label_M[rows_M]
        laws = Laws(logits_MD, target, place_M, self.label_M[rows_M])
        parts = [self.objective.rows(laws)]
        if acceptance:
            parts += [laws.log_ratio_M.exp(), laws.log_acceptance_M.exp()]
        return torch.stack(parts)

    def _logits(self, rows_M: Tensor, states_MW: Tensor, *weights: Tensor) -> Tensor:
        if not weights:
            return self.project(states_MW)
        # Each depth through its own lm_head, and back into the order of the rows.
        depth_M = self.depth_M[rows_M]
        order_M = depth_M.argsort(stable=True)
        parts = states_MW[order_M].split(depth_M.bincount(minlength=len(weights)).tolist())
        logits = [functional.linear(s, w) for s, w in zip(parts, weights, strict=True)]
        return torch.cat(logits)[order_M.argsort()]


class _ChunkedSums(torch.autograd.Function):
    """Sums of the rows' losses by depth.  The gradients of a chunk are taken while its logits
    exist, so that nothing is computed twice and no [M, D] tensor outlives its chunk."""

    @staticmethod
    def forward(ctx, rows, depths, states_MW, *weights):  # type: ignore[no-untyped-def]
        ctx.depth_M = rows.depth_M
        grads = [torch.zeros_like(t) for t in (states_MW, *weights)]
        dtype = torch.promote_types(torch.float32, states_MW.dtype)
        loss_K = torch.zeros(depths, device=states_MW.device, dtype=dtype)
        for rows_M in rows.chunks():
            inputs = [t.detach().requires_grad_() for t in (states_MW[rows_M], *weights)]
            with torch.enable_grad():
                loss_M = rows.statistics(False, rows_M, *inputs)[0]
                total = loss_M.sum()
            loss_K.index_add_(0, rows.depth_M[rows_M], loss_M.detach())
            grads[0][rows_M], *others = torch.autograd.grad(total, inputs)
            for grad, other in zip(grads[1:], others, strict=True):
                grad += other
        ctx.save_for_backward(*grads)
        return loss_K

    @staticmethod
    def backward(ctx, grad_K):  # type: ignore[no-untyped-def]
        states_MW, *weights = ctx.saved_tensors
        states_MW = states_MW * grad_K[ctx.depth_M, None].to(states_MW.dtype)
        weights = [w * grad_K[depth].to(w.dtype) for depth, w in enumerate(weights)]
        return None, None, states_MW, *weights


def _all_statistics(rows: _Rows, acceptance: bool, states_MW: Tensor, *weights: Tensor) -> Tensor:
    """[S, M] `statistics` of all rows.  For gradients a chunk's logits are computed again: what
    weighs a row of one depth is known only once the row's other depths are."""
    chunks = rows.chunks()
    order_M = torch.cat(chunks)
    states = states_MW[order_M].split([len(chunk) for chunk in chunks])
    parts = [
        checkpoint(
            rows.statistics, acceptance, chunk, state, *weights,
            use_reentrant=False, preserve_rng_state=False,
        )
        for chunk, state in zip(chunks, states, strict=True)
    ]  # fmt: skip
    return torch.cat(parts, 1)[:, order_M.argsort()]


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
) -> dict[str, Tensor]:
    """Sums of `objective` over loss rows, and how often drafts are right.

    Args:
        states: for each depth k, draft states [M_k, W].
        rows: for each depth k, flat positions t [M_k]; the teacher of row t is hidden[t + k] and
            its label ids[t + 1 + k].
        hidden: target states, flat over batch and time.
        ids: tokens, flat likewise.
        project: states to draft-vocabulary logits with the target's frozen lm_head.
        weights: own lm_head of each depth [D, W]; None: `project` serves the head too.
        draft_ids: sorted ids of the draft vocabulary; None for all.
        project_all: states to logits over all ids; beside `draft_ids`, without it no acceptance
            is known.
    Returns:
        loss, top1 and prefix, each [K]: see `Head.forward`; without gradients, or where the
        objective needs it, also accepted [K]: sum over rows of P(drafts 1..k are all accepted).
    """
    depth_M = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])
    teacher_M = torch.cat([r + k for k, r in enumerate(rows, start=1)])
    label_M = draft_index(ids[teacher_M + 1], draft_ids)
    hit_M = torch.zeros_like(label_M, dtype=torch.bool)
    whole = None if draft_ids is None else project_all or _no_project_all
    all_rows = _Rows(
        objective, depth_M, teacher_M, label_M, hit_M, hidden, project, whole, draft_ids
    )
    states_MW, own, found = torch.cat(states), weights or [], {}
    if torch.is_grad_enabled() and not objective.accepted:
        found["loss"] = _ChunkedSums.apply(all_rows, len(rows), states_MW, *own)
    else:
        acceptance = objective.accepted > 0 or whole is not _no_project_all
        loss_M, *two = _all_statistics(all_rows, acceptance, states_MW, *own)
        if acceptance:
            accepted_M = _accepted(*two, rows, len(ids))
            found["accepted"] = _by_depth(accepted_M.detach(), rows)
            loss_M = loss_M + objective.accepted * (1 - accepted_M)
        found["loss"] = _by_depth(loss_M, rows)
    return found | _hits(hit_M, rows, len(ids))


def _no_project_all(hidden: Tensor) -> Tensor:
    raise TypeError("an acceptance over a draft vocabulary needs distil's project_all")


def _by_depth(value_M: Tensor, rows: list[Tensor]) -> Tensor:
    """[K] sums over the rows of each depth."""
    return torch.stack([part.sum() for part in value_M.split([len(r) for r in rows])])


def _accepted(ratio_M: Tensor, alpha_M: Tensor, rows: list[Tensor], positions: int) -> Tensor:
    """[M] P(drafts 1..k are all accepted), estimated from the text x ~ p of each row:

        prod_{i<k} min(1, q_i(x_i) / p_i(x_i)) * alpha_k.

    Its mean over text of the target is exact, since E_{x~p}[min(1, q/p)] runs over the drafts
    x ~ q that are accepted, each on its own prefix; the sum over k is the expected number of
    accepted tokens.  (A product of mean alphas is not: depths depend on each other.)  A token
    outside the draft vocabulary has ratio 0.
    """
    reached = ratio_M.new_ones(positions)
    sizes, parts = [len(r) for r in rows], []
    for r, ratio, alpha in zip(rows, ratio_M.split(sizes), alpha_M.split(sizes), strict=True):
        parts.append(reached[r] * alpha)
        reached = reached * torch.zeros_like(reached).index_put((r,), ratio)
    return torch.cat(parts)


def _hits(hit_M: Tensor, rows: list[Tensor], positions: int) -> dict[str, Tensor]:
    """top1 and prefix sums by depth from the hits of all rows."""
    alive = torch.ones(positions, dtype=torch.bool, device=hit_M.device)
    top1, prefix = [], []
    for r, hit in zip(rows, hit_M.split([len(r) for r in rows]), strict=True):
        hits = torch.zeros_like(alive)
        hits[r] = hit
        alive &= hits
        top1.append(hits.sum())
        prefix.append(alive.sum())
    return {"top1": torch.stack(top1), "prefix": torch.stack(prefix)}


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
