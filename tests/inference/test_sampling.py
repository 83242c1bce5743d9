"""What a call may ask for, by the public surface: given as transformers gives it, or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from fixtures import EOS, PROMPTS, TARGETS, VOCAB, Scripted, double, make_head, plain, stock, tiny
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkLogitsProcessor,
)

from selfdraft.heads import HEADS, InputError
from selfdraft.inference.settings import OTHERWISE, REFUSED
from selfdraft.inference.speculator import Speculator

KINDS = sorted(HEADS)
TOKENS = 16
EVERY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "sequence_bias": [[[40], 3.0], [[7, 41], 9.0]],
    "bad_words_ids": [[7], [8, 9], [200, 201]],
    "min_new_tokens": 10,
    "forced_bos_token_id": 6,
    "forced_eos_token_id": [5],
    "exponential_decay_length_penalty": (4, 1.2),
    "suppress_tokens": list(range(30, 60)),
    "begin_suppress_tokens": list(range(60, 200)),
    "remove_invalid_values": True,
}
ENDINGS = list(range(40))  # so many that rows end early
UNLIKE = [*PROMPTS[:3], [12]]


@cache
def speculator(kind: str = "hydra") -> Speculator:
    return Speculator(tiny(), make_head(kind, tiny().spec, scale=0.02))


@cache
def model() -> Any:
    return stock(TARGETS["llama"])


def transformers_ids(ids: list[int], tokens: int = TOKENS, **settings: Any) -> list[int]:
    """New tokens of transformers' own generate."""
    prompt = torch.tensor([ids])
    arguments = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": EOS} | settings
    out = model().generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    return out[0, len(ids) :].tolist()


@cache
def unruled() -> list[list[int]]:
    """What transformers writes without a rule, one prompt being a single token."""
    return [transformers_ids(ids, eos_token_id=ENDINGS) for ids in UNLIKE]


# -- greedy, against transformers ----------------------------------------------------------------


@pytest.mark.parametrize("names", [*EVERY, "all"])
def test_greedy_is_transformers_generate(names: str, monkeypatch: Any) -> None:
    """G10: each setting alone and all together, in a batch of unlike prompts."""
    monkeypatch.setattr(tiny(), "eos_ids", set(ENDINGS))
    first = unruled()
    every = EVERY | {"bad_words_ids": [[first[0][1]], first[2][2:4]]}
    settings = every if names == "all" else {names: every[names]}
    expected = [transformers_ids(ids, eos_token_id=ENDINGS, **settings) for ids in UNLIKE]
    assert (expected == first) == (names == "remove_invalid_values")
    for kind in KINDS:
        out = speculator(kind).generate(UNLIKE, max_new_tokens=TOKENS, **settings)
        assert out.token_ids == expected, kind


def test_side_branches_win_under_processors(monkeypatch: Any) -> None:
    """G6: the right token is always the second child; each node has its own prefix."""
    monkeypatch.setattr(tiny(), "eos_ids", {EOS})
    answers = [transformers_ids(ids, 25, eos_token_id=EOS, **EVERY) for ids in UNLIKE]
    known = list(zip(UNLIKE, answers, strict=True))
    spec = Speculator(tiny(), Scripted(known, max_depth=3, side=True))
    out = spec.generate(UNLIKE, max_new_tokens=25, **EVERY)
    assert out.token_ids == answers
    assert out.stats.tokens_per_round > 3


def test_temperature_towards_zero_is_greedy() -> None:
    """0 takes the argmax whatever the seed; 1e-6 samples from a law that is as good as it."""
    spec = speculator()
    expected = plain(tiny(), PROMPTS, TOKENS)
    for seed, temperature in enumerate((0, 0.0, 1e-6, 1e-40)):
        settings = {"do_sample": True, "temperature": temperature, "seed": seed}
        out = spec.generate(PROMPTS, max_new_tokens=TOKENS, top_p=0.9, **settings)
        assert out.token_ids == expected, temperature


# -- custom processors ---------------------------------------------------------------------------


class Alternate(LogitsProcessor):
    """Even ids after an odd prefix length, odd ids after an even one; writes into its argument."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids.shape[1] % 2 :: 2] -= 1000.0
        return scores


class Counting(LogitsProcessor):
    """Keeps state: forbids another token at each call."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.calls]), -torch.inf)


class Narrow(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :5]


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ([Alternate()], {}),
        ([Alternate()], {"repetition_penalty": 1.3, "min_new_tokens": 5}),
        # One that a setting asks for as well takes that one's place, as in transformers.
        ([Alternate(), RepetitionPenaltyLogitsProcessor(2.0)], {"repetition_penalty": 1.1}),
        ([WatermarkLogitsProcessor(VOCAB, "cpu", bias=5.0)], {}),
        (LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]), {}),
    ],
    ids=["one", "with settings", "instead", "watermark", "list"],
)
def test_custom_processors(own: Any, settings: dict[str, Any]) -> None:
    theirs = {**settings, "logits_processor": LogitsProcessorList(own)}
    expected = [transformers_ids(ids, **theirs) for ids in UNLIKE]
    assert expected != plain(tiny(), UNLIKE, TOKENS)
    for kind in KINDS:
        arguments = {"logits_processor": own, **settings}
        out = speculator(kind).generate(UNLIKE, max_new_tokens=TOKENS, **arguments)
        assert out.token_ids == expected, kind


@pytest.mark.parametrize(
    ("processor", "word"),
    [
        (Counting(), "Counting gives two answers"),
        (Narrow(), r"Narrow returned \(1, 5\)"),
        ("top_k", "holds a str"),
        (
            SynthIDTextWatermarkLogitsProcessor(5, [1, 2], 16, 4, 4, "cpu"),
            "SynthIDTextWatermarkLogitsProcessor cannot be honoured: it keeps state",
        ),
    ],
)
def test_processors_that_are_no_function_of_a_prefix(processor: Any, word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        speculator().generate(PROMPTS, max_new_tokens=8, logits_processor=[processor])
    assert len(str(error.value).splitlines()) == 2


def test_a_law_without_a_token_is_an_error_when_sampling() -> None:
    with pytest.raises(InputError, match="no token of row 0 can be drawn") as error:
        speculator().generate([1], do_sample=True, logits_processor=[Nothing()])
    assert len(str(error.value).splitlines()) == 2


# -- what cannot be honoured ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REFUSED, *OTHERWISE])
def test_refused_by_name(name: str) -> None:
    """G10: an argument that is not supported raises, it is never ignored."""
    with pytest.raises(InputError, match=name) as error:
        speculator().generate([1, 2], max_new_tokens=4, **{name: 7})
    met, advice = str(error.value).splitlines()
    assert name in met
    assert len(advice) > 10


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_asks_for_nothing_is_accepted(name: str) -> None:
    spec = speculator()
    expected = spec.generate([1, 2], max_new_tokens=4).token_ids
    for value in (None, REFUSED[name][0]):
        assert spec.generate([1, 2], max_new_tokens=4, **{name: value}).token_ids == expected


def test_none_leaves_a_setting_at_its_default() -> None:
    none = dict.fromkeys(("temperature", "top_k", "top_p", "min_new_tokens", "bad_words_ids"))
    out = speculator().generate(PROMPTS, max_new_tokens=6, **none)
    assert out.token_ids == plain(tiny(), PROMPTS, 6)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"epsilon_cutoff": 1.0}, "epsilon_cutoff is 1.0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"min_new_tokens": 5}, "min_new_tokens is 5, max_new_tokens is 4"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"bad_words_ids": [[VOCAB]]}, f"bad_words_ids has id {VOCAB}"),
        ({"bad_words_ids": []}, "bad_words_ids"),
        ({"bad_words_ids": [3]}, "bad_words_ids"),
        ({"suppress_tokens": 3}, "suppress_tokens is 3"),
        ({"suppress_tokens": [-1]}, "suppress_tokens has id -1"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"begin_suppress_tokens": [999]}, "begin_suppress_tokens has id 999"),
        ({"forced_eos_token_id": 999}, "forced_eos_token_id has id 999"),
        ({"forced_bos_token_id": "x"}, "forced_bos_token_id has id 'x'"),
        ({"sequence_bias": {(1, 999): 2.0}}, "sequence_bias has id 999"),
        ({"sequence_bias": [[[1], "much"]]}, "sequence_bias"),
        ({"exponential_decay_length_penalty": 3}, "exponential_decay_length_penalty"),
        ({"logits_processor": Alternate()}, "logits_processor is a Alternate"),
        ({"no_repeat_ngrams": 2}, "Did you mean 'no_repeat_ngram_size'"),
        ({"top_q": 2}, "Did you mean 'top_"),
        ({"min_tokens": 2}, "Did you mean 'min_new_tokens'"),
        ({"badwords": [[2]]}, "Did you mean 'bad_words_ids'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_values(settings: dict[str, Any], word: str) -> None:
    for call in (speculator().generate, speculator().stream):
        with pytest.raises(InputError, match=word) as error:
            call([1, 2], max_new_tokens=4, **settings)
        assert len(str(error.value).splitlines()) == 2


# -- seeds and rows ------------------------------------------------------------------------------

WARPED = {
    "do_sample": True,
    "temperature": 1.2,
    "top_p": 0.95,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 4,
    "begin_suppress_tokens": [1, 2, 3],
    "forced_eos_token_id": 5,
}


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_are_the_same_alone_and_in_any_batch(kind: str, monkeypatch: Any) -> None:
    """G8, G11: a row depends on its prompt and its seed alone, also where settings refer to the
    prompt's length; num_return_sequences counts seeds up."""
    target = double()
    monkeypatch.setattr(target, "eos_ids", set(range(24)))
    spec = Speculator(target, make_head(kind, target.spec, depth=4, scale=0.02))
    settings = {**WARPED, "max_new_tokens": 9}
    before = torch.get_rng_state()
    out = spec.generate(PROMPTS[:3], seed=3, num_return_sequences=2, batch_size=4, **settings)
    assert torch.get_rng_state().equal(before)
    assert len({len(ids) for ids in out.token_ids}) > 1
    assert min(len(ids) for ids in out.token_ids) > 4
    assert all(ids[-1] == 5 for ids in out.token_ids if len(ids) == 9)
    assert out.token_ids[0] != out.token_ids[1]
    for row in (0, 3, 5):
        expected = out.token_ids[row]
        torch.rand(row)  # the global stream moves between runs
        alone = spec.generate(PROMPTS[row // 2], seed=3 + row, **settings)
        assert alone.token_ids == [expected]


def test_processors_see_no_padding() -> None:
    """A draft node past the end of its row, and a shorter prompt, must not reach a processor."""
    seen: list[list[int]] = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(input_ids[0].tolist())
            return scores

    out = speculator().generate(PROMPTS, max_new_tokens=10, logits_processor=[Watch()])
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, out.token_ids, strict=True)]
    for text, prompt in zip(texts, PROMPTS, strict=True):
        for length in range(len(prompt), len(text)):
            assert text[:length] in seen  # every token was decided under its own prefix
    assert all(any(ids[: len(p)] == p for p in PROMPTS) for ids in seen)
