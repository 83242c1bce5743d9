"""The chunked sums equal the same sums computed at once, values and gradients, in float64."""

import itertools

import pytest
import torch
from loss_reference import NAMES, V, accepted, direct, distil, hits, scene

from selfdraft.heads import losses, objectives
from selfdraft.heads.calibration import top_chances


@pytest.mark.parametrize("chunk", [30, 2**22])
@pytest.mark.parametrize("draft_vocab", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_sums_and_gradients(name, own, draft_vocab, chunk, monkeypatch) -> None:
    monkeypatch.setattr(objectives, "CHUNK", chunk)
    s = scene(4, own, draft_vocab)
    inputs = s.states + (s.weights or [])
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)  # each depth its own weight
    expected = direct(name, s)
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


@pytest.mark.parametrize("draft_vocab", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_evaluation_gives_the_same_loss_and_the_acceptance(name, draft_vocab) -> None:
    s = scene(4, False, draft_vocab)
    got = distil(name, s)
    torch.testing.assert_close(got["loss"], direct(name, s), rtol=1e-12, atol=1e-12)
    sums = [
        sum((float(accepted(s, k, t)) for t in r.tolist()), 0.0) for k, r in enumerate(s.rows, 1)
    ]
    torch.testing.assert_close(got["accepted"].tolist(), sums, rtol=1e-12, atol=1e-12)
    assert [got["top1"].tolist(), got["prefix"].tolist()] == list(hits(s))


@pytest.mark.parametrize("with_all", [False, True])
@torch.no_grad()
def test_chances_are_summed_by_factor_and_depth(with_all) -> None:
    s = scene(4, False, True)
    if not with_all:
        s.project_all = None
    found = distil("kl", s)["chance"]
    expected = [top_chances(s.project(states)).sum(1) for states in s.states]
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-12, atol=0)


def test_products_are_of_depths_in_a_row() -> None:
    rows = [torch.tensor([1, 2, 5]), torch.tensor([1, 5])]
    hit_M = torch.tensor([True, False, True, False, True])
    found = [p.nonzero()[:, 0].tolist() for p in losses.products(hit_M, rows, 7)]
    assert found == [list(range(7)), [1, 5], [5]]


def unused(hidden: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the lm_head was asked")


@pytest.mark.parametrize("name", ["tv", "lk+accepted"])
def test_known_normalisers_spare_the_whole_lm_head(name) -> None:
    s = scene(4, False, True)
    expected = distil(name, s)
    wanted = torch.autograd.grad(expected["loss"].sum(), s.states)
    log_z = s.project_all(s.hidden).logsumexp(-1)
    s.project_all = unused
    got = distil(name, s, log_z=log_z)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got["loss"].sum(), s.states)
    torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)


def test_acceptance_is_reported_where_it_costs_nothing() -> None:
    s = scene(3, False, True)
    assert "accepted" not in distil("kl", s)
    assert "accepted" in distil("accepted_length", s)
    s.project_all = None
    with torch.no_grad():
        assert "accepted" not in distil("kl", s)
    with pytest.raises(TypeError, match="project_all"):
        distil("tv", s)


def test_a_head_that_is_the_target_is_always_accepted() -> None:
    """Teacher and draft law are one: every acceptance is certain, every distance 0."""
    s = scene(3, False, False)
    s.states = [s.hidden[r + k] for k, r in enumerate(s.rows, start=1)]
    with torch.no_grad():
        for name in set(NAMES) - {"ce"}:
            got = distil(name, s)
            torch.testing.assert_close(got["loss"], torch.zeros(3).double(), rtol=0, atol=1e-12)
            torch.testing.assert_close(got["accepted"].tolist(), [float(len(r)) for r in s.rows])


@pytest.mark.parametrize("kept", [None, [0, 2]])
@torch.no_grad()
def test_the_accepted_length_is_unbiased(kept: list[int] | None) -> None:
    """The estimator's mean over the target's text is the exact chance that drafts drawn from q are
    accepted, enumerated over all drafts; a product of the mean acceptances is another number."""
    tokens, depths = 3, 3
    inside = range(tokens) if kept is None else kept
    dice = torch.Generator().manual_seed(4)
    pick = slice(None) if kept is None else kept
    logits = {
        prefix: 2 * torch.randn(2, tokens, dtype=torch.float64, generator=dice)
        for k in range(depths)
        for prefix in itertools.product(range(tokens), repeat=k)
    }
    p = {prefix: pair[0].softmax(-1).tolist() for prefix, pair in logits.items()}
    q = {
        prefix: dict(zip(inside, pair[1][pick].softmax(-1).tolist(), strict=True))
        for prefix, pair in logits.items()
    }
    estimate, marginal = torch.zeros(depths).double(), []
    exact = [0.0] * depths
    for text in itertools.product(range(tokens), repeat=depths):
        chance, running = 1.0, 1.0
        for k, token in enumerate(text):
            chance *= p[text[:k]][token]
            law = q[text[:k]]
            running *= law.get(token, 0) * min(1, p[text[:k]][token] / law.get(token, 1))
            # Each draft (x_1, .., x_k) once: the tokens behind it are fixed.
            exact[k] += running if not any(text[k + 1 :]) else 0.0
        # The state of depth k is the prefix's draft logits, the teacher its target logits.
        prefixes = [text[:k] for k in range(depths)]
        hidden = torch.stack([torch.zeros(tokens)] + [logits[x][0] for x in prefixes])
        got = losses.distil(
            objectives.objective("kl"),
            [logits[x][1][None, :] for x in prefixes],
            [torch.tensor([0])] * depths,
            hidden=hidden,
            ids=torch.tensor([0, 0, *text]),
            project=lambda h: h[..., pick],
            weights=None,
            draft_ids=None if kept is None else torch.tensor(kept),
            project_all=lambda h: h,
        )
        estimate += chance * got["accepted"]
        overlaps = [sum(min(p[x][v], q[x][v]) for v in inside) for x in prefixes]
        marginal.append(chance * torch.tensor(overlaps).double())
    torch.testing.assert_close(estimate.tolist(), exact, rtol=1e-12, atol=1e-12)
    product = torch.stack(marginal).sum(0).prod()
    assert abs(float(product) - exact[-1]) > 0.02 * exact[-1]


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
    monkeypatch.setattr(objectives, "CHUNK", 3 * V)
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
