"""Distillation objectives and the chunked sum that applies them without storing logits.

Shape suffixes: M loss rows (all depths together), D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(draft logits [M, D], target logits [M, D], label index [M] or -1 outside D) -> loss [M]."""


def kl(student_MD: Tensor, teacher_MD: Tensor, label_M: Tensor) -> Tensor:
    """KL(p || q) on the draft vocabulary, p renormalised there; both laws by softmax."""
    log_p, log_q = teacher_MD.log_softmax(-1), student_MD.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def ce(student_MD: Tensor, teacher_MD: Tensor, label_M: Tensor) -> Tensor:
    """Cross-entropy on the token of the text; a token outside the draft vocabulary costs 0, since
    no change of the head could propose it."""
    loss_M = functional.cross_entropy(student_MD, label_M.clamp(min=0), reduction="none")
    return torch.where(label_M >= 0, loss_M, 0.0)


OBJECTIVES: dict[str, Objective] = {"kl": kl, "ce": ce}

CHUNK = 2**22
"""Logits held at once, in elements: the memory of a loss does not grow with the batch."""


class _ChunkedSums(torch.autograd.Function):
    """Sums of an objective by depth.  The gradients of a chunk are taken while its logits exist,
    so that no [M, D] tensor outlives its chunk."""

    @staticmethod
    def forward(ctx, chunks, wanted, states_MD, depth_M, depths, *weights):  # type: ignore[no-untyped-def]
        ctx.depth_M = depth_M
        grads = [torch.zeros_like(t) for t in (states_MD, *weights)] if wanted else []
        dtype = torch.promote_types(torch.float32, states_MD.dtype)
        loss = torch.zeros(depths, device=states_MD.device, dtype=dtype)
        for depth, index, loss_of in chunks():
            inputs = [states_MD[index], *weights[depth : depth + 1]]
            inputs = [t.detach().requires_grad_(wanted) for t in inputs]
            with torch.set_grad_enabled(wanted):
                total = loss_of(*inputs).sum()
            loss[depth] += total.detach()
            if wanted:
                state, *weight = torch.autograd.grad(total, inputs)
                grads[0][index] = state
                for grad in weight:
                    grads[1 + depth] += grad
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        states, *weights = ctx.saved_tensors
        states = states * grad_loss[ctx.depth_M, None].to(states.dtype)
        weights = [w * grad_loss[depth].to(w.dtype) for depth, w in enumerate(weights)]
        return None, None, states, None, None, *weights


def distil(
    objective: Objective,
    states: list[Tensor],
    rows: list[Tensor],
    *,
    hidden: Tensor,
    ids: Tensor,
    project: Callable[[Tensor], Tensor],
    weights: list[Tensor] | None,
    draft_ids: Tensor | None,
) -> dict[str, Tensor]:
    """Sums of `objective` over loss rows, and how often the argmax equals the text.

    Args:
        states: for each depth k, draft states [M_k, width].
        rows: for each depth k, flat positions t [M_k]; the teacher of row t is hidden[t + k] and
            its label ids[t + 1 + k].
        hidden: target states, flat over batch and time.
        ids: tokens, flat likewise.
        project: states to draft-vocabulary logits with the target's frozen lm_head.
        weights: own lm_head of each depth [D, width]; None: `project` serves the head too.
        draft_ids: sorted ids of the draft vocabulary; None for all.
    Returns:
        loss, top1 and prefix, each [depth]: see `Head.forward`.
    """
    depth_M = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])
    teacher_M = torch.cat([r + k for k, r in enumerate(rows, start=1)])
    label_M = draft_index(ids[teacher_M + 1], draft_ids)
    hit_M = torch.zeros(len(label_M), dtype=torch.bool, device=ids.device)
    # Rows of unlike depth that share a teacher stand together: its logits are computed once.
    order_M = teacher_M.argsort(stable=True)

    def chunks():  # type: ignore[no-untyped-def]
        width = project(hidden[:1]).shape[-1] if draft_ids is None else len(draft_ids)
        for chunk in order_M.split(max(1, CHUNK // width)):
            teachers, inverse = teacher_M[chunk].unique_consecutive(return_inverse=True)
            with torch.no_grad():
                teacher = _wide(project(hidden[teachers]))
            for depth in depth_M[chunk].unique().tolist():
                mine = depth_M[chunk] == depth
                index, law = chunk[mine], teacher[inverse[mine]]

                def loss_of(state: Tensor, weight: Tensor | None = None) -> Tensor:
                    own = project(state) if weight is None else functional.linear(state, weight)
                    own = _wide(own)
                    hit_M[index] = own.detach().argmax(-1) == label_M[index]  # noqa: B023
                    return objective(own, law, label_M[index])  # noqa: B023

                yield depth, index, loss_of

    # Asked here, since inside a Function gradients are always off.
    wanted = torch.is_grad_enabled()
    states_MD = torch.cat(states)
    loss = _ChunkedSums.apply(chunks, wanted, states_MD, depth_M, len(states), *(weights or []))
    return {"loss": loss, **_hits(hit_M, depth_M, rows, ids.numel())}


def _wide(logits: Tensor) -> Tensor:
    """At least float32: a log-softmax in bf16 loses the tail that the loss is about."""
    return logits.to(torch.promote_types(torch.float32, logits.dtype))


def _hits(hit_M: Tensor, depth_M: Tensor, rows: list[Tensor], positions: int) -> dict[str, Tensor]:
    """top1 and prefix sums by depth from the hits of all rows."""
    alive = torch.ones(positions, dtype=torch.bool, device=hit_M.device)
    top1, prefix = [], []
    for k, rows_M in enumerate(rows):
        hits = torch.zeros_like(alive)
        hits[rows_M] = hit_M[depth_M == k]
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
