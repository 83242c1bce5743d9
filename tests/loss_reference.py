"""Sums of objectives over loss rows from their definitions, row by row, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from selfdraft.heads import losses, objectives

V, D, POSITIONS = 11, 6, 40
MIXES = {
    "kl+tv": {"kl": 0.5, "tv": 2},
    "lk+accepted": {"lk": 0.25, "accepted_length": 3.0},
}
NAMES = [*objectives.TERMS, objectives.ACCEPTED, *MIXES]


def scene(depths: int, own: bool, draft_vocab: bool) -> SimpleNamespace:
    """Random states, teacher and labels; each depth has fewer rows, the last has none."""
    torch.manual_seed(depths)
    s = SimpleNamespace()
    s.ids = torch.randint(0, V, (POSITIONS,))
    s.hidden = torch.randn(POSITIONS, D, dtype=torch.float64)
    s.lm_head = torch.randn(V, D, dtype=torch.float64)
    s.draft_ids = torch.tensor([0, 2, 3, 7, 10]) if draft_vocab else None
    kept = s.lm_head if s.draft_ids is None else s.lm_head[s.draft_ids]
    # Not linear: soft-capping comes with it.
    s.project = lambda h: 3 * torch.tanh(h @ kept.T)
    s.project_all = lambda h: 3 * torch.tanh(h @ s.lm_head.T)
    order = torch.randperm(POSITIONS - depths - 1)
    s.rows = [order[: 20 - 5 * k].sort().values for k in range(depths - 1)]
    s.rows.append(torch.zeros(0, dtype=torch.long))
    s.states = [torch.randn(len(r), D, dtype=torch.float64, requires_grad=True) for r in s.rows]
    s.weights = None
    if own:
        s.weights = [
            torch.randn(len(kept), D, dtype=torch.float64, requires_grad=True)
            for _ in range(depths)
        ]
    return s


def laws(s: SimpleNamespace, k: int, t: int) -> tuple[Tensor, Tensor, int]:
    """p and q over the draft vocabulary, p not renormalised there, and the label or -1."""
    allowed = list(range(V)) if s.draft_ids is None else s.draft_ids.tolist()
    state = s.states[k - 1][s.rows[k - 1].tolist().index(t)]
    student = s.project(state) if s.weights is None else s.weights[k - 1] @ state
    q = student.exp() / student.exp().sum()
    teacher = s.project_all(s.hidden[t + k])
    p = (teacher.exp() / teacher.exp().sum())[allowed]
    label = int(s.ids[t + 1 + k])
    return p, q, allowed.index(label) if label in allowed else -1


def accepted(s: SimpleNamespace, k: int, t: int) -> Tensor:
    """P(drafts 1..k of row t are accepted), as its text estimates it."""
    p, q, _ = laws(s, k, t)
    result = torch.minimum(p, q).sum()
    for i in range(1, k):
        p, q, label = laws(s, i, t)
        result = result * (torch.clamp(q[label] / p[label], max=1.0) if label >= 0 else 0.0)
    return result


def row_loss(name: str, s: SimpleNamespace, k: int, t: int) -> Tensor:
    """One row's loss from its definition."""
    if name in MIXES:
        return sum(weight * row_loss(part, s, k, t) for part, weight in MIXES[name].items())
    p, q, label = laws(s, k, t)
    inside, alpha = p / p.sum(), torch.minimum(p, q).sum()
    kl, tv = (inside * (inside / q).log()).sum(), 1 - alpha
    share = float((-3 * alpha.detach()).exp())
    match name:
        case "ce":
            return -q[label].log() if label >= 0 else 0 * q.sum()
        case "kl":
            return kl
        case "reverse_kl":
            return (q * (q / inside).log()).sum()
        case "tv":
            return tv
        case "lk":
            return -alpha.log()
        case "lk_hybrid":
            return share * kl + (1 - share) * tv
    return 1 - accepted(s, k, t)


def direct(name: str, s: SimpleNamespace) -> Tensor:
    """Loss sums, row by row."""
    sums = [states.sum() * 0 for states in s.states]
    for k, rows in enumerate(s.rows, start=1):
        for t in rows.tolist():
            sums[k - 1] = sums[k - 1] + row_loss(name, s, k, t)
    return torch.stack(sums)


def hits(s: SimpleNamespace) -> tuple[list[int], list[int]]:
    allowed = list(range(V)) if s.draft_ids is None else s.draft_ids.tolist()
    alive, top1, prefix = set(range(POSITIONS)), [], []
    for k, (rows, states) in enumerate(zip(s.rows, s.states, strict=True), start=1):
        right = set()
        for t, state in zip(rows.tolist(), states, strict=True):
            student = s.project(state) if s.weights is None else s.weights[k - 1] @ state
            if allowed[int(student.argmax())] == int(s.ids[t + 1 + k]):
                right.add(t)
        alive &= right
        top1.append(len(right))
        prefix.append(len(alive))
    return top1, prefix


def distil(
    name: str, s: SimpleNamespace, objective: objectives.Objective | None = None, **more: Any
) -> dict[str, Tensor]:
    """The package's own sums."""
    return losses.distil(
        objective or objectives.objective(MIXES.get(name, name)),
        s.states,
        s.rows,
        hidden=s.hidden,
        ids=s.ids,
        project=s.project,
        weights=s.weights,
        draft_ids=s.draft_ids,
        project_all=s.project_all,
        **more,
    )
