"""The Markov prior and the lm_head of low rank against direct float64 computation, and their starts
from the data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fixtures import batch_of, double, make_head
from pydantic import ValidationError
from torch import Tensor

from selfdraft.heads import HEADS, Head, objectives
from selfdraft.heads.losses import loss_rows
from selfdraft.heads.readout import SMOOTHING, LowRank, Prior
from selfdraft.train.packing import Document
from selfdraft.train.setup import bigrams

FIELDS: list[dict[str, Any]] = [
    {"prior": 4},
    {"prior": 4, "draft_ids": list(range(0, 320, 3))},
    {"low_rank": 6},
    {"low_rank": 6, "prior": 3, "draft_ids": list(range(0, 320, 3))},
]
CASES = [(kind, fields) for kind in sorted(HEADS) for fields in FIELDS]
CASES += [(kind, {"lm_head": "own", "prior": 4}) for kind in ("eagle", "medusa")]


def direct_loss(head: Head, batch: dict[str, Tensor], features: dict[str, Tensor]) -> Tensor:
    """[K] sums of KL(p || q) on the draft vocabulary, with all logits at once."""
    rows, ids = loss_rows(batch, head.config.depth), batch["ids"].flatten()
    hidden, sums = features["hidden"].flatten(0, 1), []
    states = head.unroll(batch, features, rows)
    for k, (state, r) in enumerate(zip(states, rows, strict=True), start=1):
        if head.low_rank is not None:
            logits = state @ head.low_rank.down.weight.T @ head.low_rank.up.weight.T
        elif (own := head.output_weights()) is not None:
            logits = state @ own[k - 1].T
        else:
            logits = head.spec.logits(state, head.draft_ids)
        if head.prior is not None:
            logits = logits + head.prior.before.weight[ids[r + k]] @ head.prior.after.weight.T
        log_p = head.spec.logits(hidden[r + k], head.draft_ids).log_softmax(-1)
        sums.append((log_p.exp() * (log_p - logits.log_softmax(-1))).sum())
    return torch.stack(sums)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(("kind", "fields"), CASES, ids=str)
def test_loss_and_gradients_equal_a_direct_computation(
    kind: str, fields: dict, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "CHUNK", 2000)  # several chunks
    target, batch = double(), batch_of([20, 13])
    head = make_head(kind, target.spec, loss="kl", **fields)
    features = target.features(batch["ids"], batch["length"], head.taps)
    weights = head.loss_weights().double()
    expected = direct_loss(head, batch, features)
    (expected * weights).sum().backward()
    wanted = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    if coupled:  # the other path: statistics of all rows, their gradients by a second visit
        mix = objectives.Objective({"kl": 1.0}, accepted=1e-30)
        monkeypatch.setattr("selfdraft.heads.base.objective", lambda *fields: mix)
    got = head(batch, features)["loss"]
    torch.testing.assert_close(got, expected)
    (got * weights).sum().backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def test_what_a_config_cannot_ask_for() -> None:
    for kind in ("medusa", "eagle"):
        with pytest.raises(ValidationError, match="two lm_heads"):
            HEADS[kind].Config(low_rank=4, lm_head="own")
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        HEADS["hydra"].Config(prior=-1)


# -- starts --------------------------------------------------------------------------------------


def counted(vocab: int, ids: int, pairs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(vocab * ids, generator=generator)[:pairs]
    return torch.stack([cells // ids, cells % ids], 1), 1 + cells % 7


def smoothed(vocab: int, ids: int, pairs_P2: Tensor, count_P: Tensor) -> tuple[Tensor, Tensor]:
    """Bigram laws [V, D] smoothed by the unigram law [D], from their definition."""
    c = torch.zeros(vocab, ids, dtype=torch.float64)
    c[pairs_P2[:, 0], pairs_P2[:, 1]] = count_P.double()
    p = c.sum(0) / c.sum()
    return (c + SMOOTHING * p) / (c.sum(1, keepdim=True) + SMOOTHING), p


@torch.no_grad()
def test_a_prior_of_full_rank_is_the_smoothed_bigram_law() -> None:
    vocab, ids = 30, 12
    pairs = counted(vocab, ids, 150)
    law, p = smoothed(vocab, ids, *pairs)
    prior = Prior(vocab, 20, ids).double()  # a rank above what there is
    prior.init_from(*pairs)
    got = (p.log() + prior(torch.arange(vocab))).softmax(-1)
    torch.testing.assert_close(got, law)


@torch.no_grad()
def test_a_prior_of_low_rank_is_nearer_to_the_bigram_law_than_none() -> None:
    vocab, ids = 30, 12
    pairs = counted(vocab, ids, 150)
    law, p = smoothed(vocab, ids, *pairs)
    seen = torch.zeros(vocab, dtype=p.dtype).index_add_(0, pairs[0][:, 0], pairs[1].to(p))
    often = law * seen[:, None]  # what the approximation is weighed by
    distances = []
    for rank in (1, 3, 6, 12):
        prior = Prior(vocab, rank, ids).double()
        before = (p.log() + prior(torch.arange(vocab))).softmax(-1)
        torch.testing.assert_close(before, p.expand(vocab, -1))  # it starts at nothing
        prior.init_from(*pairs)
        after = (p.log() + prior(torch.arange(vocab))).log_softmax(-1)
        distances.append(float((often * (law.log() - after)).sum()))
    assert distances == sorted(distances, reverse=True)
    assert distances[1] < float((often * (law.log() - p.log())).sum())
    assert distances[-1] < 1e-9  # all ranks there are


def test_a_prior_without_data_stays_at_nothing() -> None:
    prior = Prior(9, 3, 5)
    prior.init_from(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert not prior(torch.arange(9)).any()


@pytest.mark.parametrize("draft_ids", [None, [1, 3, 4]])
def test_bigrams_are_those_of_loss_tokens(draft_ids: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 6, (5, 30), generator=generator).tolist()
    masks = (torch.rand(5, 30, generator=generator) < 0.6).tolist()
    data = zip(rows, masks, strict=True)
    documents = [Document(ids, mask, None, n, "") for n, (ids, mask) in enumerate(data)]
    known = list(range(6)) if draft_ids is None else draft_ids
    expected = Counter(
        (d.ids[i - 1], known.index(d.ids[i]))
        for d in documents
        for i in range(1, 30)
        if d.loss_mask[i] and d.ids[i] in known
    )
    pairs, counts = bigrams(documents, None if draft_ids is None else torch.tensor(draft_ids))
    assert dict(zip(map(tuple, pairs.tolist()), counts.tolist(), strict=True)) == expected


@torch.no_grad()
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_a_low_rank_lm_head_starts_at_the_best_approximation(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lm_head = torch.randn(50, 16, generator=generator)
    hidden = torch.randn(400, 16, generator=generator) * torch.linspace(0.1, 3, 16)
    head = LowRank(16, rank, 50)
    head.init_from(lm_head, hidden)
    wanted = hidden @ (lm_head - lm_head.mean(0)).T
    left = torch.linalg.svdvals(wanted.double())[rank:].square().sum()
    error = (head(hidden) - wanted).double().square().sum()
    scale = wanted.double().square().sum()
    assert left / scale - 1e-6 <= error / scale <= left / scale + 1e-2


def test_fewer_ids_than_the_rank() -> None:
    head = LowRank(16, 8, 3)
    lm_head, hidden = torch.randn(3, 16), torch.randn(60, 16)
    head.init_from(lm_head, hidden)
    wanted = (hidden @ lm_head.T).log_softmax(-1)
    torch.testing.assert_close(head(hidden).log_softmax(-1), wanted, atol=1e-3, rtol=1e-3)
