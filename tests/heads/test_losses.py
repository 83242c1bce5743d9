"""The chunked sums equal the same sums computed at once, values and gradients, in float64."""

from types import SimpleNamespace

import pytest
import torch

from selfdraft.heads import losses

V, D, POSITIONS = 11, 6, 40


def scene(depths: int, own: bool, draft_vocab: bool) -> SimpleNamespace:
    """Random states, teacher and labels; rows of unlike number a depth, the last depth without."""
    torch.manual_seed(depths)
    s = SimpleNamespace()
    s.ids = torch.randint(0, V, (POSITIONS,))
    s.hidden = torch.randn(POSITIONS, D, dtype=torch.float64)
    s.lm_head = torch.randn(V, D, dtype=torch.float64)
    s.draft_ids = torch.tensor([0, 2, 3, 7, 10]) if draft_vocab else None
    kept = s.lm_head if s.draft_ids is None else s.lm_head[s.draft_ids]
    s.project = lambda h: torch.tanh(h @ kept.T)  # not linear: soft-capping comes with it
    s.rows = [
        torch.randperm(POSITIONS - depths - 1)[: 20 - 5 * k].sort().values
        for k in range(depths - 1)
    ] + [torch.zeros(0, dtype=torch.long)]
    s.states = [torch.randn(len(r), D, dtype=torch.float64, requires_grad=True) for r in s.rows]
    s.weights = None
    if own:
        s.weights = [
            torch.randn(len(kept), D, dtype=torch.float64, requires_grad=True)
            for _ in range(depths)
        ]
    return s


def direct(name: str, s: SimpleNamespace) -> list[torch.Tensor]:
    """Loss sums from their definitions, row by row."""
    allowed = list(range(V)) if s.draft_ids is None else s.draft_ids.tolist()
    sums = []
    for k, (rows, states) in enumerate(zip(s.rows, s.states, strict=True), start=1):
        total = states.sum() * 0
        for t, state in zip(rows.tolist(), states, strict=True):
            student = s.project(state) if s.weights is None else s.weights[k - 1] @ state
            log_q = student - student.exp().sum().log()
            teacher = s.project(s.hidden[t + k])
            p = teacher.exp() / teacher.exp().sum()
            label = int(s.ids[t + 1 + k])
            if name == "kl":
                total = total + (p * (p.log() - log_q)).sum()
            elif label in allowed:
                total = total - log_q[allowed.index(label)]
        sums.append(total)
    return sums


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


def distil(name: str, s: SimpleNamespace) -> dict[str, torch.Tensor]:
    return losses.distil(
        losses.OBJECTIVES[name], s.states, s.rows, hidden=s.hidden, ids=s.ids,
        project=s.project, weights=s.weights, draft_ids=s.draft_ids,
    )  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 70, 2**22])
@pytest.mark.parametrize("draft_vocab", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["kl", "ce"])
def test_sums_and_gradients(name, own, draft_vocab, chunk, monkeypatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    s = scene(4, own, draft_vocab)
    inputs = s.states + (s.weights or [])
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)  # each depth its own weight
    expected = torch.stack(direct(name, s))
    wanted = torch.autograd.grad(expected @ scale, inputs, allow_unused=True)
    got = distil(name, s)
    torch.testing.assert_close(got["loss"], expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got["loss"] @ scale, inputs)
    for one, other in zip(grads, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    top1, prefix = hits(s)
    assert got["top1"].tolist() == top1
    assert got["prefix"].tolist() == prefix


def test_hits_are_counted_where_there_are_any() -> None:
    s = scene(3, False, False)
    s.project = lambda h: h[..., :1] * 0 + torch.eye(V, dtype=torch.float64)[0]  # always token 0
    s.ids[:] = 0
    s.ids[int(s.rows[1][0]) + 3] = 1  # the second depth misses once
    got = distil("ce", s)
    common = set(s.rows[0].tolist()) & set(s.rows[1].tolist())
    assert got["top1"][1] == len(s.rows[1]) - 1
    missed = {t for t in s.rows[1].tolist() if int(s.ids[t + 3]) == 1}
    first = [t for t in s.rows[0].tolist() if int(s.ids[t + 2]) == 0]
    assert got["top1"][0] == len(first)
    assert got["prefix"][1] == len((common & set(first)) - missed)


def test_no_logits_outlive_their_chunk(monkeypatch) -> None:
    """The widest tensor that the projection ever makes is a chunk's."""
    monkeypatch.setattr(losses, "CHUNK", 3 * V)
    s, seen = scene(3, False, False), []
    inner = s.project
    s.project = lambda h: (seen.append(len(h)), inner(h))[1]
    distil("kl", s)["loss"].sum().backward()
    assert max(seen) <= 3
    assert sum(seen) > 10


def test_bf16_states_are_measured_in_float32() -> None:
    s = scene(2, False, False)
    s.states = [x.detach().bfloat16().requires_grad_() for x in s.states]
    kept = s.lm_head.bfloat16()
    s.hidden, s.project = s.hidden.bfloat16(), lambda h: h @ kept.T
    got = distil("kl", s)["loss"]
    assert got.dtype == torch.float32
    got.sum().backward()
    assert s.states[0].grad.dtype == torch.bfloat16
    logits = [s.project(s.states[0].detach()).float(), s.project(s.hidden[s.rows[0] + 1]).float()]
    log_q, log_p = (x.log_softmax(-1) for x in logits)
    expected = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=0)


def test_draft_index() -> None:
    ids = torch.tensor([0, 1, 2, 5, 9, 10])
    kept = torch.tensor([1, 5, 9])
    assert losses.draft_index(ids, kept).tolist() == [-1, 0, -1, 1, 2, -1]
    assert losses.draft_index(ids, None) is ids
