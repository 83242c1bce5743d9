"""Sums of an objective over loss rows, in chunks, so that no tensor of all rows' logits exists.

Shape suffixes: B rows, T tokens, M loss rows, W hidden width, R own features, D draft vocabulary, S
statistics of a row, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from . import objectives
from .calibration import FACTORS, top_chances
from .objectives import Laws, Objective, Project, TargetLaws, wide
from .weighting import Weighting, products


@dataclass(frozen=True)
class _Rows:
    """The loss rows of all depths end to end, and where their laws come from.

    Attributes:
        hit_M: filled as the rows are visited: is the draft's argmax the token of the text?
        learning: gradients are wanted, in this visit or a later one.
    """

    objective: Objective
    depth_M: Tensor
    teacher_M: Tensor
    label_M: Tensor
    hit_M: Tensor
    target: TargetLaws
    learning: bool

    def chunks(self, elements: int) -> tuple[Tensor, ...]:
        """Rows [m] that are computed together, their logits at most `elements`.  Those of unlike
        depth that share a teacher stand together, so that its law is computed once."""
        width = self.target.project(self.target.hidden[:1]).shape[-1]
        return self.teacher_M.argsort(stable=True).split(max(1, elements // width))

    def statistics(self, acceptance: bool, rows_M: Tensor, *inputs: Tensor) -> Tensor:
        """Of each row of a chunk: its loss; for `acceptance` min(1, q(x)/p(x)) and alpha; and its
        `top_chances` where nothing is learned.

        Args:
            inputs: states [M, W] of these rows, and the own weights [D, r] of each depth if any.
        Returns:
            [S, M].
        """
        logits_MD, label_M = wide(self._logits(rows_M, *inputs)), self.label_M[rows_M]
        self.hit_M[rows_M] = logits_MD.detach().argmax(-1) == label_M
        laws = Laws(logits_MD, self.target, self.teacher_M[rows_M], label_M)
        parts = [self.objective.rows(laws)]
        if acceptance:
            parts += [laws.log_ratio_M.exp(), laws.log_acceptance_M.exp()]
        if not self.learning:
            parts += top_chances(logits_MD)
        return torch.stack(parts)

    @torch.no_grad()
    def find_hits(self, *inputs: Tensor) -> None:
        """Fills `hit_M` from the logits alone."""
        for rows_M in self.chunks(objectives.CHUNK):
            best_M = self._logits(rows_M, inputs[0][rows_M], *inputs[1:]).argmax(-1)
            self.hit_M[rows_M] = best_M == self.label_M[rows_M]

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


def _visit(
    rows: _Rows, acceptance: bool, inputs: Sequence[Tensor], grad_SM: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """`statistics` of all rows, a chunk at a time.

    Args:
        inputs: states [M, W], and the own weights of each depth if any.
        grad_SM: of some sum by each statistic; None where no gradients are wanted.
    Returns:
        [S, M], and the gradients of that sum by `inputs`, taken while a chunk's logits exist.
    """
    wanted, parts = grad_SM is not None, []
    grads = [torch.zeros_like(t) for t in inputs] if wanted else []
    # The acceptance keeps about twice as many tensors of a chunk alive.
    chunks = rows.chunks(objectives.CHUNK // 2 if acceptance else objectives.CHUNK)
    for rows_M in chunks:
        own = [t.detach().requires_grad_(wanted) for t in (inputs[0][rows_M], *inputs[1:])]
        with torch.set_grad_enabled(wanted):
            part_SM = rows.statistics(acceptance, rows_M, *own)
            total = None if grad_SM is None else (part_SM * grad_SM[:, rows_M]).sum()
        parts.append(part_SM.detach())
        if total is not None:
            grads[0][rows_M], *others = torch.autograd.grad(total, own)
            for grad, other in zip(grads[1:], others, strict=True):
                grad += other
    return torch.cat(parts, 1)[:, torch.cat(chunks).argsort()], grads


class _LossSums(torch.autograd.Function):
    """[K] sums of the rows' losses times their weights.  One pass gives value and gradient, since
    within a depth nothing else weighs a row, whatever is made of the sums."""

    @staticmethod
    def forward(ctx, rows, weight_M, depths, *inputs):  # type: ignore[no-untyped-def]
        ctx.depth_M = rows.depth_M
        weight_M = weight_M.to(torch.promote_types(torch.float32, inputs[0].dtype))
        statistics, grads = _visit(rows, False, inputs, weight_M[None])
        ctx.save_for_backward(*grads)
        loss_K = weight_M.new_zeros(depths)
        return loss_K.index_add_(0, rows.depth_M, statistics[0].to(weight_M.dtype) * weight_M)

    @staticmethod
    def backward(ctx, grad_K):  # type: ignore[no-untyped-def]
        states_MW, *weights = ctx.saved_tensors
        states_MW = states_MW * grad_K[ctx.depth_M, None].to(states_MW.dtype)
        weights = [w * grad_K[depth].to(w.dtype) for depth, w in enumerate(weights)]
        return None, None, None, states_MW, *weights


class _Statistics(torch.autograd.Function):
    """[S, M] statistics with acceptance.  What weighs a row of one depth is known only once the
    row's other depths are, so the backward visits the rows again."""

    @staticmethod
    def forward(ctx, rows, *inputs):  # type: ignore[no-untyped-def]
        ctx.rows, kind = rows, inputs[0].device.type
        ctx.autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )
        ctx.save_for_backward(*inputs)
        return _visit(rows, True, inputs)[0]

    @staticmethod
    def backward(ctx, grad_SM):  # type: ignore[no-untyped-def]
        with ctx.autocast:
            return None, *_visit(ctx.rows, True, ctx.saved_tensors, grad_SM)[1]


UNIFORM = Weighting()


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
    weighting: Weighting = UNIFORM,
) -> dict[str, Tensor]:
    """Sums of `objective` over loss rows, and how often drafts are right.

    Args:
        states: for each depth k, draft states [M_k, W]: what `project` reads, then what the depth's
            own weights read.
        rows: for each depth k, flat positions t [M_k]; teacher hidden[t + k], label ids[t + 1 + k].
        hidden, ids: target states and tokens, flat over batch and time.
        project: states to draft-vocabulary logits with the target's frozen lm_head.
        weights: own weights of each depth [D, r] for the last r features of its states, added to
            what `project` makes of the others, if any; None: `project` reads all.
        draft_ids: of the draft vocabulary, sorted; None for all.
        project_all: to logits over all ids; beside `draft_ids`, no acceptance without it.
        log_z: of these logits at every position, flat, where it is known: see `normalisers`.
        weighting: of the rows' losses; top1, prefix, accepted and chance count all rows alike.
    Returns:
        loss, top1, prefix [K]: see `Head.forward`; in evaluation, or where the objective needs it,
        accepted [K]: sums of P(drafts 1..k are all accepted); in evaluation also chance [S, K].
    """
    depth_M = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])
    teacher_M = torch.cat([r + k for k, r in enumerate(rows, start=1)])
    label_M = draft_index(ids[teacher_M + 1], draft_ids)
    hit_M = torch.zeros_like(label_M, dtype=torch.bool)
    whole = None if draft_ids is None else project_all or _no_project_all
    laws = TargetLaws(hidden, teacher_M.unique(), project, whole, log_z)
    coupled, learning = objective.accepted > 0, torch.is_grad_enabled()
    all_rows = _Rows(objective, depth_M, teacher_M, label_M, hit_M, laws, learning)
    inputs, found = [torch.cat(states), *(weights or [])], {}
    weigh = partial(weighting.weights, hit_M, rows, len(ids))
    if learning and not coupled:
        if not weighting.uniform:
            all_rows.find_hits(*inputs)
        found["loss"] = _LossSums.apply(all_rows, weigh(), len(rows), *inputs)
    else:
        acceptance = coupled or whole is not _no_project_all
        if learning:
            loss_M, *more = _Statistics.apply(all_rows, *inputs)
        else:
            loss_M, *more = _visit(all_rows, acceptance, inputs)[0]
            found["chance"] = torch.stack([_by_depth(part, rows) for part in more[-FACTORS:]])
        if acceptance:
            ratio_M, alpha_M, *_ = more
            accepted_M = _accepted(ratio_M, alpha_M, rows, len(ids))
            found["accepted"] = _by_depth(accepted_M.detach(), rows)
            loss_M = loss_M + objective.accepted * (1 - accepted_M)
        found["loss"] = _by_depth(loss_M * weigh().to(loss_M.dtype), rows)
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
    reached = products(ratio_M, rows, positions)
    return alpha_M * torch.cat([before[r] for before, r in zip(reached, rows, strict=False)])


def _hits(hit_M: Tensor, rows: list[Tensor], positions: int) -> dict[str, Tensor]:
    """top1 and prefix sums by depth from the hits of all rows."""
    prefix = torch.stack(products(hit_M, rows, positions)[1:]).sum(1)
    return {"top1": _by_depth(hit_M, rows), "prefix": prefix}


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
