"""Laws of every setting against the processors that transformers' own generate prepares."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from enumeration import decode_law, distance, memoised, target_law
from fixtures import EOS, TARGETS, VOCAB, make_head, micro, stock
from torch import Tensor
from transformers.generation import logits_process as theirs

from selfdraft.inference.sampling import RowSampling
from selfdraft.inference.settings import Settings
from selfdraft.inference.warpers import faster

TOKENS = 9
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_h": 0.5},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"sequence_bias": [[[4], 2.5], [[1, 5], -3.0], [[9, 2, 6], 8.0]]},
    {"bad_words_ids": [[3], [1, 5], [9, 2, 6], [EOS]]},
    {"min_new_tokens": 2},
    {"forced_bos_token_id": 6},
    {"forced_eos_token_id": [8, 11]},
    {"exponential_decay_length_penalty": (1, 1.5)},
    {"suppress_tokens": [2, 3, 300]},
    {"begin_suppress_tokens": [1, 7]},
    {"begin_suppress_tokens": [1, 7], "forced_bos_token_id": 6},
    {"remove_invalid_values": True, "suppress_tokens": [4]},
    {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[3], [1, 5]],
        "min_new_tokens": 2,
        "forced_eos_token_id": 8,
        "suppress_tokens": [2, 3, 300],
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.9,
    },
]
HISTORY = [[1, 5, 9, 2, 6, 1], [7, 1, 1, 9, 2], [12]]  # prompts; the last is of one token
PATHS = [[], [1], [1, 5], [9, 2], [3, 3, 1, 1, 5, 9, 2], [1, 5, 9, 2, 6, 1, 9, 2]]


@cache
def model() -> Any:
    return stock(TARGETS["llama"], dtype=torch.float64)


def prepared(prompt: list[int], settings: dict[str, Any], tokens: int = TOKENS) -> Any:
    """The processors that transformers makes for a sampled call."""
    found: list[Any] = []

    def keep(model: Any, input_ids: Tensor, logits_processor: Any, **rest: Any) -> Tensor:
        found.append(logits_processor)
        return input_ids

    ids = torch.tensor([prompt])
    plain = {"do_sample": True, "top_k": 0, "temperature": 1.0, "pad_token_id": EOS}
    arguments = plain | {"max_new_tokens": tokens, "attention_mask": torch.ones_like(ids)}
    model().generate(ids, **(arguments | settings), custom_generate=keep)
    return found[0]


def laws(settings: dict[str, Any], logits_BNV: Tensor, **of_the_call: Any) -> Tensor:
    call = {"do_sample": True, "eos_ids": (EOS,), "max_new_tokens": TOKENS} | of_the_call
    sampling = RowSampling(Settings(**(call | settings)), HISTORY)
    nodes, flat = logits_BNV.shape[1], logits_BNV.flatten(0, 1)
    return sampling.laws(flat, lambda m: (m // nodes, PATHS[m % nodes])).view_as(logits_BNV)


def random_logits(*shape: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_laws_are_the_softmax_of_transformers_chain(settings: dict[str, Any]) -> None:
    """Each node under its own prefix: prompts of several lengths, paths past every length rule."""
    logits = random_logits(len(HISTORY), len(PATHS), VOCAB)
    got = laws(settings, logits)
    for row, prompt in enumerate(HISTORY):
        chain = prepared(prompt, settings)
        for node, path in enumerate(PATHS):
            scores = chain(torch.tensor([prompt + path]), logits[row, node][None].clone())
            expected = scores.softmax(-1)[0]
            assert torch.equal(got[row, node] > 0, expected > 0)
            assert torch.allclose(got[row, node], expected, rtol=1e-12, atol=1e-15)
    plain = laws({}, logits)
    assert settings == {} or not got.allclose(plain)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_the_chain_has_transformers_order(settings: dict[str, Any]) -> None:
    own = Settings(do_sample=True, eos_ids=(EOS,), max_new_tokens=TOKENS, **settings)
    # transformers says min_new_tokens a second time, as a min_length.
    expected = [
        p for p in prepared(HISTORY[0], settings) if type(p) is not theirs.MinLengthLogitsProcessor
    ]
    assert [type(p) for p in own.processors(6)] == [type(faster(p)) for p in expected]


class AfterEven(theirs.TemperatureLogitsWarper):
    """A temperature after prefixes of even length alone."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] % 2 else super().__call__(input_ids, scores)


def test_a_subclass_of_a_warper_sees_its_prefix() -> None:
    """What transformers' class does not look at, a user's may."""
    logits = random_logits(len(HISTORY), 3, VOCAB)
    plain, cold = laws({}, logits), laws({"temperature": 0.5}, logits)
    got = laws({"logits_processor": [AfterEven(0.5)]}, logits)
    for row, prompt in enumerate(HISTORY):
        for node, path in enumerate(PATHS[:3]):
            expected = (plain if len(prompt + path) % 2 else cold)[row, node]
            assert torch.allclose(got[row, node], expected, rtol=1e-12, atol=1e-15)


# -- our own warpers -----------------------------------------------------------------------------

WARPERS: list[Callable[[], Any]] = [
    lambda: theirs.TopKLogitsWarper(1),
    lambda: theirs.TopKLogitsWarper(11),
    lambda: theirs.TopKLogitsWarper(10**6),
    lambda: theirs.TopKLogitsWarper(2, min_tokens_to_keep=5),
    lambda: theirs.TopPLogitsWarper(1e-6),
    lambda: theirs.TopPLogitsWarper(0.31),
    lambda: theirs.TopPLogitsWarper(0.9),
    lambda: theirs.TopPLogitsWarper(0.999),
    lambda: theirs.TopPLogitsWarper(0.2, min_tokens_to_keep=4),
    lambda: theirs.MinPLogitsWarper(0.0),
    lambda: theirs.MinPLogitsWarper(0.05),
    lambda: theirs.MinPLogitsWarper(1.0),
    lambda: theirs.MinPLogitsWarper(1.0, min_tokens_to_keep=3),
    lambda: theirs.TypicalLogitsWarper(0.05),
    lambda: theirs.TypicalLogitsWarper(0.6),
    lambda: theirs.TypicalLogitsWarper(0.97),
    lambda: theirs.TypicalLogitsWarper(0.5, min_tokens_to_keep=3),
]
IDS = range(len(WARPERS))


def sample_scores(dtype: torch.dtype) -> list[Tensor]:
    """Laws from almost flat to a point, narrow and wide, with forbidden tokens."""
    scores = []
    for seed, (vocab, scale) in enumerate(
        [(5, 1.0), (5, 6.0), (300, 3.0), (700, 0.2), (3000, 5.0), (20000, 2.0)]
    ):
        x = random_logits(4, vocab, seed=seed, scale=scale)
        x[1, ::2] = -torch.inf
        x[2, 1:] = -torch.inf
        scores.append(x.to(dtype))
    return scores


@pytest.mark.parametrize("number", IDS)
def test_own_warpers_keep_what_transformers_keep(number: int) -> None:
    stock_warper = WARPERS[number]()
    own = faster(stock_warper)
    for scores in sample_scores(torch.float64):
        given = scores.clone()
        assert torch.equal(own(None, scores), stock_warper(None, given))
        assert torch.equal(scores, given)
        equal = (scores * 2).round()  # many equal scores: which of them stay is the sort's choice
        got, expected = own(None, equal), stock_warper(None, equal)
        assert torch.equal(got.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("number", IDS)
def test_in_float32_they_differ_only_where_rounding_decides(number: int) -> None:
    """At the border of top-p and typical-p, sums of float32 probabilities are good to 1e-6."""
    stock_warper = WARPERS[number]()
    own = faster(stock_warper)
    for scores in sample_scores(torch.float32):
        law = scores.double().softmax(-1)
        got, expected = (x > -torch.inf for x in (own(None, scores), stock_warper(None, scores)))
        assert ((got ^ expected).sum(-1) <= 1).all()
        assert (law * (got ^ expected)).sum() < 1e-3


def test_ties_at_the_border_of_top_p_keep_the_higher_ids() -> None:
    """As a stable ascending sort has it."""
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0, -1.0]], dtype=torch.float64)
    own = faster(theirs.TopPLogitsWarper(0.9))
    kept = (own(None, scores) > -torch.inf)[0].tolist()
    assert kept == [False, True, True, True, True, False]
    expected = theirs.TopPLogitsWarper(0.9)(None, scores) > -torch.inf
    assert sum(kept) == int(expected.sum())


@pytest.mark.parametrize("number", IDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_law_stay_without(number: int, value: float) -> None:
    scores = random_logits(3, 600)
    scores[1] = value
    scores[2, 7] = value
    law = faster(WARPERS[number]())(None, scores).softmax(-1)
    assert law[0].sum() == pytest.approx(1)
    assert not law[1].sum() > 0 or law[1].isfinite().all()


def test_another_filter_value_is_left_to_transformers() -> None:
    warper = theirs.TopPLogitsWarper(0.5, filter_value=-100.0)
    assert faster(warper) is warper


# -- the joint law of whole runs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("hydra", {"top_p": 0.9, "min_new_tokens": 2, "no_repeat_ngram_size": 2}),
        ("medusa", {"typical_p": 0.9, "temperature": 4.0, "bad_words_ids": [[0], [1, 3]]}),
        ("hydra", {"min_p": 0.1, "temperature": 4.0, "repetition_penalty": 1.5}),
        ("hydra", {"temperature": 3.0, "suppress_tokens": [3], "forced_eos_token_id": 1}),
    ],
)
def test_joint_law(kind: str, settings: dict[str, Any], monkeypatch: Any) -> None:
    """Through the public call, every decision enumerated, against transformers' chain."""
    target, prompt, tokens = memoised(micro(4, 5)), [1, 0], 3
    head = make_head(kind, target.spec, depth=2, scale=0.5, seed=5)
    got = decode_law(monkeypatch, target, head, [prompt], max_new_tokens=tokens, **settings)
    chain = prepared(prompt, settings | {"eos_token_id": 2}, tokens)

    def law(logits_V: Tensor, ids: list[int]) -> Tensor:
        return chain(torch.tensor([ids]), logits_V[None].clone())[0].softmax(-1)

    expected = target_law(target, [prompt], tokens, law)
    assert len(expected) > 3
    assert distance(got, expected) < 1e-12
