"""Each head kind learns what there is to learn: chains whose best acceptance is known."""

from functools import cache
from typing import Any

import pytest
import torch
from fixtures import make_head
from markov import (
    DEPTH,
    best_points,
    drafted_laws,
    markov_target,
    point_length,
    random_laws,
    sample,
    sampled_length,
)
from torch import Tensor

from selfdraft.heads import HEADS, Head
from selfdraft.inference.target import TargetModel

TEXTS, ROWS, TIME, LR = 25, 24, 20, 1e-2
STEPS = {1: 100, 2: 200}  # by the chain's order
SLOW = {"eagle": 2}  # kinds that need more: the token enters through attention alone
BLIND = {"medusa"}  # kinds that do not see the root token
FIELDS: dict[str, dict[str, Any]] = {  # the targets' own MLPs are tiny
    "mtp": {"width": 128},
    "eagle": {"width": 128, "recycle": "normed", "norm_stage": "post"},
}
CASES: list[tuple[str, dict[str, Any]]] = [(kind, FIELDS.get(kind, {})) for kind in sorted(HEADS)]
CASES += [("mtp", {"modules": "depth"} | FIELDS["mtp"])]


@cache
def chain(order: int) -> tuple[Tensor, TargetModel]:
    """Laws for which the likeliest tokens, slot by slot, are nearly the best proposals."""
    laws = random_laws(order, seed=order - 1, peak=2.5)
    return laws, markov_target(laws)


def learn(head: Head, target: TargetModel, laws_VVV: Tensor, steps: int) -> None:
    dice, length = torch.Generator().manual_seed(1), torch.full((ROWS,), TIME)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, weight_decay=0.0)
    texts = [sample(laws_VVV, ROWS, TIME, dice) for _ in range(TEXTS)]
    mask = torch.ones(ROWS, TIME, dtype=torch.bool)
    data = [(ids, target.features(ids, length, head.taps)) for ids in texts]
    for step in range(steps):
        ids, features = data[step % TEXTS]
        batch = {"ids": ids, "loss_mask": mask}
        loss = (head(batch, features)["loss"] / head.counts(batch)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
        optimizer.step()


@pytest.mark.parametrize("order", [1, 2])
def test_the_target_has_the_laws(order: int) -> None:
    laws, target = chain(order)
    ids = sample(laws, 4, TIME, torch.Generator().manual_seed(0))
    before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
    hidden = target.features(ids, torch.full((4,), TIME), [])["hidden"]
    torch.testing.assert_close(target.logits(hidden).softmax(-1), laws[before, ids])


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.proof)])
@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_a_trained_head_is_near_the_best_there_is(kind: str, fields: dict, order: int) -> None:
    laws, target = chain(order)
    head = make_head(kind, target.spec, depth=DEPTH, scale=0.0, **fields)
    head.init_from_target(target.weights)
    before = drafted_laws(head, target, laws)
    learn(head, target, laws, STEPS[order] * SLOW.get(kind, 1))
    after = drafted_laws(head, target, laws)
    best = best_points(laws, sees_root=kind not in BLIND)
    assert point_length(laws, after) >= 0.95 * best
    assert point_length(laws, after) > point_length(laws, before)
    assert point_length(laws, after) <= best * 1.0001
    if kind not in BLIND:  # they can know the law itself: a sampled chain is accepted whole
        assert sampled_length(laws, after) >= 0.95 * DEPTH
