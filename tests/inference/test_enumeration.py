"""The exact joint law of the whole loop: drafter, verifier, cache, EOS and length together.

A float64 target of a few tokens and a real head with random weights; every random decision of a
call is enumerated, and the law of its output is compared with that of sampling from the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumeration import decode_law, distance, exact_law, law_of, memoised, target_law
from fixtures import make_head, micro
from torch import Tensor
from transformers import LogitsProcessor

from selfdraft.heads import HEADS
from selfdraft.inference import decode, verifier
from selfdraft.inference.cache import SlotCache
from selfdraft.inference.speculator import Speculator

TOLERANCE, BIASED = 1e-12, 1e-3
PROMPT = [1, 0, 3]


@pytest.mark.parametrize(
    ("kind", "seed", "settings"),
    [
        ("medusa", 0, {}),
        ("hydra", 1, {}),
        ("hydra", 2, {"temperature": 0.6, "top_k": 3}),
        ("medusa", 3, {"temperature": 1.7, "top_p": 0.9}),
        ("hydra", 4, {"repetition_penalty": 1.8, "top_k": 3}),
        ("medusa", 5, {"repetition_penalty": 0.8, "temperature": 2.0, "top_p": 0.9}),
    ],
)
def test_joint_law(kind: str, seed: int, settings: dict[str, Any], monkeypatch) -> None:
    target = memoised(micro(5 if settings else 4, seed))
    head = make_head(kind, target.spec, depth=2, scale=0.5, seed=seed)
    got = decode_law(monkeypatch, target, head, [PROMPT], max_new_tokens=3, **settings)
    expected = target_law(target, [PROMPT], 3, law_of(**settings))
    assert any(2 in row[:2] for (row,) in expected)  # some end with EOS before the last token
    assert distance(got, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in sorted(HEADS)),
        pytest.param("hydra", {"prefix_attention": True}, marks=pytest.mark.proof),
    ],
)
def test_joint_law_over_more_rounds(kind: str, fields: dict[str, Any], monkeypatch) -> None:
    target = memoised(micro(4, 7))
    head = make_head(kind, target.spec, depth=2, scale=0.5, seed=7, draft_ids=[0, 2, 3], **fields)
    got = decode_law(monkeypatch, target, head, [[1]], max_new_tokens=6, top_k=2)
    expected = target_law(target, [[1]], 6, law_of(top_k=2))
    assert max(len(row) for (row,) in expected) == 6
    assert distance(got, expected) < TOLERANCE


def test_joint_law_of_a_batch(monkeypatch) -> None:
    """Two unlike prompts: the rows' outputs are independent, each with its own law."""
    target, prompts = memoised(micro(3, 1)), [[1], [0, 1, 1]]
    head = make_head("hydra", target.spec, depth=1, scale=0.5)
    got = decode_law(monkeypatch, target, head, prompts, max_new_tokens=3, seed=[10, 20])
    assert distance(got, target_law(target, prompts, 3)) < TOLERANCE


class OnlyOutside(LogitsProcessor):
    """Allows what the head cannot draft, at every second position."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        blocked = torch.full_like(scores, -torch.inf)
        blocked[:, 3:] = scores[:, 3:]
        return blocked if input_ids.shape[1] % 2 else scores


@pytest.mark.parametrize("length", [1, 2])
def test_a_processor_may_forbid_the_whole_draft_vocabulary(length: int, monkeypatch) -> None:
    target, prompt = memoised(micro(5, 2)), [1] * length
    head = make_head("medusa", target.spec, depth=2, scale=0.5, draft_ids=[0, 1, 2])
    settings = {"max_new_tokens": 4, "top_k": 3, "logits_processor": [OnlyOutside()]}
    got = decode_law(monkeypatch, target, head, [prompt], **settings)

    def law(logits_V: Tensor, ids: list[int]) -> Tensor:
        scores = OnlyOutside()(torch.tensor([ids]), logits_V[None])[0]
        return law_of(top_k=3)(scores, ids)

    assert distance(got, target_law(target, [prompt], 4, law)) < TOLERANCE


def test_real_noise_follows_the_law() -> None:
    """What the odometer replaces: RowNoise itself, against the law by frequency."""
    target = memoised(micro(4, 3))
    head = make_head("hydra", target.spec, depth=2, scale=0.5)
    trials, prompts = 4000, [[1, 3]] * 200
    counts: dict[Any, float] = {}
    for start in range(0, trials, 200):
        out = Speculator(target, head).generate(
            prompts, max_new_tokens=2, do_sample=True, seed=start, batch_size=200
        )
        for row in out.token_ids:
            counts[(tuple(row),)] = counts.get((tuple(row),), 0) + 1 / trials
    expected = target_law(target, [[1, 3]], 2)
    # TV <= sqrt((V-1)/N)/2 + sqrt(ln(1/delta)/(2N)) with delta = 1e-6
    bound = 0.5 * ((len(expected) - 1) / trials) ** 0.5 + (13.8 / (2 * trials)) ** 0.5
    assert distance(counts, expected) < bound


# -- the odometer sees what is wrong -------------------------------------------------------------


def test_the_odometer_itself() -> None:
    law = exact_law(lambda tape: (tape.choose([0.5, 0, 0.5]), tape.choose([0.25, 0.75])))
    assert law == {(0, 0): 0.125, (0, 1): 0.375, (2, 0): 0.125, (2, 1): 0.375}


def wrong_residual(monkeypatch: Any) -> None:
    monkeypatch.setattr(verifier, "residual", lambda p, q, token: verifier.without(p, token))


def wrong_laws(monkeypatch: Any) -> None:
    """The target's laws are one node late."""
    right = decode.verify

    def late(draft: Any, laws: Any, noise: Any) -> Any:
        return right(draft, [law.roll(1, 0) for law in laws], noise)

    monkeypatch.setattr(decode, "verify", late)


def wrong_cache(monkeypatch: Any) -> None:
    """Rejected slots are kept."""

    def keep(self: Any, paths: list[list[int]]) -> None:
        self.lengths = [length + 3 for length in self.lengths]

    monkeypatch.setattr(SlotCache, "keep", keep)


def wrong_history(monkeypatch: Any) -> None:
    """Draft tokens are left out of what the processors see."""
    right = decode._paths

    def without(draft: Any) -> Any:
        return lambda m: (right(draft)(m)[0], [])

    monkeypatch.setattr(decode, "_paths", without)


def wrong_eos(monkeypatch: Any) -> None:
    """A block runs past the EOS inside it."""

    def emit(self: Any, tokens: list[int]) -> Any:
        self.new += tokens
        del self.new[self.limit :]
        ended = len(self.new) == self.limit or self.new[-1] in self.eos_ids
        self.finish = "x" if ended else None
        return decode.Commit(self.index, tokens, self.finish)

    monkeypatch.setattr(decode.Row, "emit", emit)


@pytest.mark.parametrize(
    "damage", [wrong_residual, wrong_laws, wrong_cache, wrong_history, wrong_eos]
)
def test_a_wrong_loop_is_caught(damage: Callable, monkeypatch) -> None:
    target = memoised(micro(4, 4))
    head = make_head("hydra", target.spec, depth=2, scale=0.5)
    settings = {"repetition_penalty": 3.0}
    damage(monkeypatch)
    got = decode_law(monkeypatch, target, head, [[1]], max_new_tokens=3, **settings)
    assert distance(got, target_law(target, [[1]], 3, law_of(**settings))) > BIASED
