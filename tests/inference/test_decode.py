"""The decoding loop: plain ids whatever is drafted, exact lengths, stops inside a block, seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import (
    EOS,
    PROMPTS,
    TARGETS,
    Scripted,
    double,
    make_head,
    plain,
    script,
    spoiled_head,
    stock,
    tiny,
)

from selfdraft.heads import HEADS
from selfdraft.inference.speculator import Speculator

KINDS = sorted(HEADS)


def many_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


# -- greedy output is plain output ---------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_ids_are_plain_and_transformers(name: str) -> None:
    """G5: 20 prompts, each head kind, draft lengths 1 to 4, 32 tokens, fp32, in one batch."""
    target, model, prompts = (
        tiny(name),
        stock(TARGETS[name]),
        many_prompts(20 if name == "llama" else 4),
    )
    expected = []
    for ids in prompts:
        prompt = torch.tensor([ids])
        ids_BT = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False,
            pad_token_id=EOS,
        )  # fmt: skip
        expected.append(ids_BT[0, len(ids) :].tolist())
    assert plain(target, prompts, 32) == expected
    for kind in KINDS:
        head = make_head(kind, target.spec, depth=4, scale=0.02)
        accepted = 0
        for depth in range(1, 5):
            out = Speculator(target, head, plan=depth).generate(prompts, max_new_tokens=32)
            assert out.token_ids == expected, (kind, depth)
            accepted += sum(out.stats.accepted_by_depth)
        assert accepted > 0 or name != "llama"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_broken_heads_give_the_same_greedy_ids(kind: str, value: float) -> None:
    target = tiny()
    head = spoiled_head(kind, target.spec, value)
    expected = plain(target, PROMPTS, 16)
    for settings in ({}, {"repetition_penalty": 1.0000001}):  # the second scatters and warps
        out = Speculator(target, head).generate(PROMPTS, max_new_tokens=16, **settings)
        assert out.token_ids == expected
    sampled = Speculator(target, head).generate(PROMPTS, max_new_tokens=16, do_sample=True)
    assert [len(ids) for ids in sampled.token_ids] == [16] * 4


# -- lengths and stops ---------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [None, [0], [1, 4, 0, 2]])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17])
def test_max_new_tokens_is_exact(tokens: int, pattern: list[int] | None) -> None:
    """G3."""
    target = tiny()
    drafter = script(target, max_depth=5, pattern=pattern)
    out = Speculator(target, drafter).generate(PROMPTS, max_new_tokens=tokens)
    assert out.token_ids == [ids[:tokens] for ids in plain(target, PROMPTS, 40)]
    assert out.finish_reasons == ["length"] * 4


@pytest.mark.parametrize("pattern", [None, [0], [1, 4, 0, 2], [3]])
@pytest.mark.parametrize("tokens", [3, 17])
def test_eos_inside_a_block_ends_the_row(ending: Any, pattern: Any, tokens: int) -> None:
    target, answer, follow = ending
    long = Scripted([(PROMPTS[1], follow)], max_depth=5, pattern=pattern)
    out = Speculator(target, long).generate(PROMPTS[1], max_new_tokens=tokens)
    assert out.token_ids == [answer[:tokens]]
    assert out.finish_reasons == ["length" if tokens < len(answer) else "eos"]
    assert out.stats.tokens == len(out.token_ids[0])


def test_eos_as_the_first_token(monkeypatch) -> None:
    target = tiny()
    first = plain(target, PROMPTS, 1)
    monkeypatch.setattr(target, "eos_ids", {first[0][0]})
    out = Speculator(target, script(target, 20)).generate(PROMPTS, max_new_tokens=12)
    assert out.token_ids[0] == first[0]
    assert out.finish_reasons[0] == "eos"
    assert out.token_ids == plain(target, PROMPTS, 12)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_stop_strings_end_where_plain_does(depth: int) -> None:
    """G2: inside a block, over two tokens, over two blocks; the completing token is the last."""
    target = tiny()
    alphabet = [ids for ids in range(256) if target.tokenizer.decode([ids]).isascii()]
    answer = alphabet[40:64]  # one printable character a token
    text = target.tokenizer.decode(answer)
    drafter = Scripted([(PROMPTS[0], answer)], max_depth=depth)
    for place in range(1, 14):
        for width in (1, 2, 3):
            stop = text[place : place + width]
            for spec in (Speculator(target, drafter), Speculator(target)):
                out = spec.generate(
                    PROMPTS[0], max_new_tokens=20, stop_strings=[stop, "never"],
                    logits_processor=[Forcing(PROMPTS[0], answer)],
                )  # fmt: skip
                assert out.texts == [text[: place + width]]
                assert out.finish_reasons == ["stop"]


class Forcing:
    """A logits processor that leaves one token: the next one of a text."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.start, self.answer = len(prompt), answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self.start
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.answer[min(place, len(self.answer) - 1)]] = 0
        return forced


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("prompt", [1, 20, 30, 31])
def test_position_limit(name: str, prompt: int, monkeypatch) -> None:
    """G4: no crash, and the end is where plain decoding has it."""
    size = {"n_positions": 32} if name == "gpt2" else {"max_position_embeddings": 32}
    target, ids = double(name, **size), list(range(prompt))
    monkeypatch.setattr(target, "eos_ids", set())
    out = Speculator(target).generate(ids, max_new_tokens=60)
    assert len(out.token_ids[0]) == 32 - prompt
    assert out.finish_reasons == ["positions"]
    head = make_head("medusa", target.spec, depth=4, scale=0.02)
    together = Speculator(target, head).generate([ids, [5, 6]], max_new_tokens=60)
    assert together.token_ids[0] == out.token_ids[0]
    assert len(together.token_ids[1]) == 30


# -- batches, seeds, plans -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}])
def test_a_row_is_the_same_alone_and_in_any_batch(kind: str, settings: dict, monkeypatch) -> None:
    """G11: prompts of 3, 17, 9 and 30 tokens, rows that end early, exactly in float64."""
    target = double()
    monkeypatch.setattr(target, "eos_ids", set(range(24)))
    head = make_head(kind, target.spec, depth=4, scale=0.02)
    spec, seeds = Speculator(target, head), [3, 1, 4, 15]
    together = spec.generate(PROMPTS, max_new_tokens=24, seed=seeds, **settings)
    assert len({len(ids) for ids in together.token_ids}) > 1
    small = spec.generate(PROMPTS, max_new_tokens=24, seed=seeds, batch_size=3, **settings)
    assert small.token_ids == together.token_ids
    for ids, seed, expected in zip(PROMPTS, seeds, together.token_ids, strict=True):
        alone = spec.generate(ids, max_new_tokens=24, seed=seed, **settings)
        assert alone.token_ids == [expected]


def test_a_row_near_its_limit_is_the_same_alone_and_beside_a_longer_one() -> None:
    """The room that a row has left must not depend on its neighbours, in tokens or in counts."""
    target = double(max_position_embeddings=40)
    head = make_head("medusa", target.spec, depth=4, scale=0.01)
    long, short = list(range(30)), [5, 6]
    for seed in range(20):
        settings = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7}
        alone = Speculator(target, head).generate(long, seed=seed, **settings)
        beside = Speculator(target, head).generate([long, short], seed=[seed, 0], **settings)
        assert beside.token_ids[0] == alone.token_ids[0]


def test_seeds() -> None:
    """G8: the same seed the same ids, other seeds others; an int counts up over the rows."""
    target = tiny()
    spec = Speculator(target, make_head("hydra", target.spec))

    def ids(seed: int | list[int], **more: Any) -> list[list[int]]:
        torch.rand(3)  # the global stream moves between runs
        return spec.generate(
            PROMPTS[:1], max_new_tokens=12, do_sample=True, seed=seed, **more
        ).token_ids

    first = ids(1)
    assert ids(1) == first
    assert len({str(ids(seed)) for seed in (1, 2, 3)}) > 1
    several = ids(1, num_return_sequences=3)
    assert several == [*first, *ids(2), *ids(3)]
    assert ids([7, 1, 2], num_return_sequences=3) == [*ids(7), *ids(1), *ids(2)]
    greedy = [spec.generate(PROMPTS[:1], max_new_tokens=8, seed=seed).token_ids for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_the_callers_random_state_is_left_alone() -> None:
    target = tiny()
    spec = Speculator(target, make_head("medusa", target.spec))
    before = torch.get_rng_state()
    spec.generate(PROMPTS, max_new_tokens=6, do_sample=True)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_draft_length_follows_the_head(kind: str, depth: int) -> None:
    """G12: the default is the head's depth; deeper is cut with a note, shallower is honoured."""
    target = tiny()
    head = make_head(kind, target.spec, depth=depth)
    out = Speculator(target, head).generate(PROMPTS, max_new_tokens=12)
    assert len(out.stats.drafted_by_depth) == depth
    with pytest.warns(UserWarning, match=f"{depth + 2} tokens.*{depth}"):
        deeper = Speculator(target, head, plan=depth + 2)
    assert deeper.plan.depth == depth
    none = Speculator(target, head, plan=0).generate(PROMPTS, max_new_tokens=12)
    assert none.token_ids == out.token_ids
    assert none.stats.drafted_by_depth == []
