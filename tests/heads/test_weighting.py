"""Rows that weigh by what the head itself would reach: values and gradients by definition, in
float64, and equal sums however a batch is split."""

import pytest
import torch
from fixtures import batch_of, double, make_head
from loss_reference import POSITIONS, distil, row_loss, scene
from pydantic import ValidationError
from torch import Tensor

from selfdraft.heads import HEADS, objectives
from selfdraft.heads.losses import draft_index
from selfdraft.heads.weighting import Weighting, products, round_starts

BOTH = {"reach": 0.75, "on_policy": 0.5}
SETTINGS = [{"reach": 1.0}, {"on_policy": 1.0}, BOTH]


def weights(s, reach: float = 0.0, on_policy: float = 0.0) -> list[list[float]]:
    """The weight of each row, by depth, from its definition."""
    right: list[set[int]] = []
    for k, (rows, states) in enumerate(zip(s.rows, s.states, strict=True), start=1):
        logits = s.project(states) if s.weights is None else states @ s.weights[k - 1].T
        label = draft_index(s.ids[rows + 1 + k], s.draft_ids)
        right.append(set(rows[logits.argmax(-1) == label].tolist()))
    starts, t = set(), 0
    first = set(s.rows[0].tolist())
    for t in sorted(first):
        if t - 1 in first:
            continue
        while t in first:  # plays the rounds of one answer
            starts.add(t)
            accepted = 0
            while accepted < len(right) and t in right[accepted]:
                accepted += 1
            t += 1 + accepted
    return [
        [
            (1.0 if all(t in hits for hits in right[: k - 1]) else 1 - reach)
            * (1.0 if t in starts else 1 - on_policy)
            for t in rows.tolist()
        ]
        for k, rows in enumerate(s.rows, start=1)
    ]


def teach(s) -> None:
    """Texts that the drafts often get right, so that there is something to reach."""
    kept = torch.arange(s.lm_head.shape[0]) if s.draft_ids is None else s.draft_ids
    for k, (rows, states) in enumerate(zip(s.rows, s.states, strict=True), start=1):
        logits = s.project(states) if s.weights is None else states @ s.weights[k - 1].T
        some = torch.arange(len(rows)) % 3 > 0
        s.ids[rows[some] + 1 + k] = kept[logits.argmax(-1)[some]]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda f: "-".join(f))
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["kl", "ce", "lk_hybrid", "lk+accepted"])
def test_sums_and_gradients(name, own, fields, monkeypatch) -> None:
    monkeypatch.setattr(objectives, "CHUNK", 30)
    s = scene(4, own, True)
    teach(s)
    expected = weights(s, **fields)
    assert len({w for depth in expected for w in depth}) > 1
    sums = [
        sum(
            (w * row_loss(name, s, k, t) for w, t in zip(found, r.tolist(), strict=True)),
            states.sum() * 0,
        )
        for k, (found, r, states) in enumerate(zip(expected, s.rows, s.states, strict=True), 1)
    ]
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    inputs = s.states + (s.weights or [])
    wanted = torch.autograd.grad(torch.stack(sums) @ scale, inputs, allow_unused=True)
    got = distil(name, s, weighting=Weighting(**fields))
    torch.testing.assert_close(got["loss"], torch.stack(sums), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got["loss"] @ scale, inputs)
    for one, other in zip(grads, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        again = distil(name, s, weighting=Weighting(**fields))
    torch.testing.assert_close(again["loss"], got["loss"], rtol=1e-12, atol=1e-12)
    plain = distil(name, s)
    assert got["top1"].equal(plain["top1"]) and got["prefix"].equal(plain["prefix"])


def test_products_are_of_depths_in_a_row() -> None:
    rows = [torch.tensor([1, 2, 5]), torch.tensor([1, 5])]
    hit_M = torch.tensor([True, False, True, False, True])
    found = [p.nonzero()[:, 0].tolist() for p in products(hit_M, rows, 7)]
    assert found == [list(range(7)), [1, 5], [5]]


def test_rounds_start_behind_the_correction_and_anew_in_each_answer() -> None:
    row_R = torch.tensor([3, 4, 5, 6, 7, 11, 12, 13])
    length_R = torch.tensor([1, 9, 0, 2, 0, 5, 0, 0])
    starts = row_R[round_starts(row_R, length_R)].tolist()
    assert starts == [3, 5, 6, 11]  # 3 accepts one, 5 none, 6 two: beyond the answer's end
    assert not round_starts(row_R[:0], length_R[:0]).any()


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda f: "-".join(f))
def test_a_gradient_does_not_depend_on_the_split(fields) -> None:
    target, batch = double(), batch_of([24, 15, 19], prompt=2)
    head = make_head("hydra", target.spec, scale=0.05, **fields)
    features = target.features(batch["ids"], batch["length"], [])
    # Half of the text is what the head would draft, as far as one step of it goes.
    greedy = target.spec.logits(features["hidden"]).argmax(-1)
    batch["ids"][:, 1::2] = greedy[:, :-1:2][:, : batch["ids"][:, 1::2].shape[1]]
    features = target.features(batch["ids"], batch["length"], [])
    counts = head.counts(batch)

    def gradients(parts: list[slice]) -> list[Tensor]:
        head.zero_grad()
        for part in parts:
            rows = {name: value[part] for name, value in batch.items()}
            states = {name: value[part] for name, value in features.items()}
            (head(rows, states)["loss"] / counts).sum().backward()
        return [p.grad.clone() for p in head.parameters()]

    whole, split = gradients([slice(0, 3)]), gradients([slice(0, 1), slice(1, 3)])
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("field", ["reach", "on_policy"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "1"])
def test_bad_shares_are_refused(field: str, value) -> None:
    with pytest.raises(ValidationError):
        HEADS["hydra"].Config(**{field: value})


def test_all_of_them_off_is_the_plain_loss() -> None:
    s = scene(3, True, False)
    assert Weighting().uniform and not Weighting(reach=0.5).uniform
    hit_M = torch.ones(sum(len(r) for r in s.rows), dtype=torch.bool)
    assert Weighting().weights(hit_M, s.rows, POSITIONS).eq(1).all()
    assert Weighting(reach=1.0).weights(hit_M, s.rows, POSITIONS).eq(1).sum() == 35
