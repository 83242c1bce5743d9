"""Draft vocabularies widened by each row's own text: which ids, which logits, the same output."""

from __future__ import annotations

import pytest
import torch
from fixtures import CLOSE, PROMPTS, batch_of, double, make_head, plain, precise, tiny
from torch import Tensor, nn

from selfdraft.heads import HEADS, Head, Plan
from selfdraft.heads.errors import InputError
from selfdraft.heads.widening import Widened
from selfdraft.inference.projection import Projection
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

STATIC = list(range(0, 320, 40))
SHARED = [(kind, fields) for kind in sorted(HEADS) for fields in ({}, {"prior": 3})]


def widened(kind: str, spec, **fields) -> Head:
    head = make_head(kind, spec, draft_ids=STATIC, **fields)
    head.widen = True
    return head


def expected_logits(head: Head, hidden: Tensor, path: Tensor, own: list[list[int]]) -> Tensor:
    """[B, V] over all target ids, -inf but for the draft vocabulary and each row's own ids."""
    full = torch.full((len(own), head.spec.vocab_size), -torch.inf, dtype=hidden.dtype)
    logits = head.spec.logits(hidden)
    for row, ids in enumerate(own):
        full[row, ids] = logits[row, ids]
    full[:, STATIC] = head.draft_logits(hidden, path)
    return full


def by_id(head: Head, state: Widened, logits: Tensor) -> Tensor:
    full = logits.new_full((len(logits), head.spec.vocab_size), -torch.inf)
    for row in range(len(logits)):
        for token, value in zip(state.draft_ids[row].tolist(), logits[row], strict=True):
            full[row, token] = torch.maximum(full[row, token], value)
    return full


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize(("kind", "fields"), SHARED, ids=str)
@torch.no_grad()
def test_logits_are_the_targets_for_the_rows_own_ids(kind: str, fields: dict, name: str) -> None:
    target = precise(name)
    batch, head = batch_of([12, 9], prompt=1), widened(kind, target.spec, **fields)
    ids = batch["ids"]
    features = target.features(ids, batch["length"], head.taps)
    length, count = torch.tensor([5, 3]), torch.tensor([2, 3])
    state = head.start(ids[:, :6], length, {n: f[:, :5] for n, f in features.items()})
    own = [ids[0, :6].tolist(), ids[1, :4].tolist()]
    committed = torch.stack([ids[0, 6:9], ids[1, 4:7]])
    nodes = {n: torch.stack([f[0, 5:9], f[1, 3:7]]) for n, f in features.items()}
    after = head.advance(state, committed, count, nodes)
    grown = [own[0] + committed[0, :2].tolist(), own[1] + committed[1].tolist()]
    one = after.select(torch.tensor([1]))
    for now, texts in ((state, own), (after, grown), (one, grown[1:])):
        assert isinstance(now, Widened)
        path = torch.tensor([[[text[-1]]] for text in texts])
        hidden = now.step(now.inner, path, torch.zeros(len(texts), 1, dtype=torch.long), {})
        logits = now.draft_logits(hidden, path)[:, 0]
        wanted = expected_logits(head, hidden[:, 0], path[:, 0], texts)
        torch.testing.assert_close(by_id(head, now, logits), wanted, **CLOSE[target.dtype])


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("plan", [Plan(3), Plan(3, nodes=7)])
def test_greedy_output_is_the_plain_one_and_own_ids_are_drafted(kind: str, plan: Plan) -> None:
    target = tiny()
    head, drafted = widened(kind, target.spec), set()
    inner = head.propose

    def propose(state, *rest):
        draft = inner(state, *rest)
        for row, tokens in enumerate(draft.tokens):
            assert {*tokens[1:]} <= {*STATIC, *state.further[row]}
            drafted.update(tokens[1:])
        return draft

    head.propose = propose  # type: ignore[method-assign]
    out = Speculator(target, head, plan).generate(PROMPTS, max_new_tokens=24)
    assert out.token_ids == plain(target, PROMPTS, 24)
    assert drafted - {*STATIC}


@pytest.mark.parametrize("settings", [{}, {"top_k": 8}, {"repetition_penalty": 1.3}], ids=str)
def test_a_row_is_the_same_alone_and_in_a_batch(settings: dict) -> None:
    target = double()
    spec = Speculator(target, widened("hydra", target.spec), Plan(3, nodes=5))
    seeds = [5, 6, 7, 8]
    both = spec.generate(PROMPTS, max_new_tokens=16, do_sample=True, seed=seeds, **settings)
    for prompt, seed, row in zip(PROMPTS, seeds, both.token_ids, strict=True):
        alone = spec.generate(prompt, max_new_tokens=16, do_sample=True, seed=seed, **settings)
        assert alone.token_ids == [row]


def test_the_targets_projections_are_not_kept_for_each_text() -> None:
    target = double()
    spec = Speculator(target, widened("hydra", target.spec))
    spec.generate(PROMPTS, max_new_tokens=12)
    before = len(target.spec.projector._made)
    spec.generate([ids[::-1] for ids in PROMPTS], max_new_tokens=12)
    assert len(target.spec.projector._made) == before


def test_heads_that_cannot_widen_do_not() -> None:
    spec = tiny().spec
    all_ids = make_head("hydra", spec)
    others = [make_head("medusa", spec, draft_ids=STATIC, lm_head="own")]
    others.append(make_head("mtp", spec, draft_ids=STATIC, low_rank=4))
    for head in (all_ids, *others):
        head.widen = True
        assert not head.can_widen
        out = Speculator(tiny(), head).generate(PROMPTS, max_new_tokens=8)
        assert out.token_ids == plain(tiny(), PROMPTS, 8)


class Halved(nn.Linear):
    """A quantized lm_head as libraries make them: an nn.Linear whose weight is not what it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, 2 * self.weight)


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_an_lm_head_that_is_more_than_its_weight_is_called(packed: bool) -> None:
    """By decoding and by training; its weight is refused to what would start from it."""
    model = tiny().model
    model.lm_head = Halved(*reversed(model.lm_head.weight.shape), bias=False)
    target = TargetModel(model, pack=packed)
    hidden = torch.randn(3, 64)
    expected = model.lm_head(hidden)
    torch.testing.assert_close(target.logits(hidden), expected)
    torch.testing.assert_close(target.spec.logits(hidden), expected)
    assert target.vocab_size == expected.shape[1]
    with pytest.raises(InputError, match="no dense weight"):
        target.weights.lm_head(None)
    heads = Speculator(target, make_head("hydra", target.spec, draft_ids=STATIC))
    assert heads.generate(PROMPTS, max_new_tokens=8).token_ids == plain(target, PROMPTS, 8)


@torch.no_grad()
def test_an_lm_head_without_a_dense_weight_is_gathered_from_its_logits() -> None:
    target = double()
    opaque = Projection(lambda hidden: target.lm_head(hidden), target.config)
    rows, hidden = torch.tensor([[3, 5, 5], [0, 7, 1]]), torch.randn(2, 4, 64).double()
    got = opaque(rows, False)(hidden)
    torch.testing.assert_close(got, target.spec.projector(rows, False)(hidden))
    torch.testing.assert_close(got[1, 2, 1], target.spec.logits(hidden[1, 2])[7])
