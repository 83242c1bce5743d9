"""What a call counts: rounds, forwards and accepted tokens, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures import PROMPTS, Scripted, double, plain, script, tiny

from selfdraft.inference.speculator import Speculator


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("side", [False, True])
def test_an_oracle_is_accepted_whole(side: bool, settings: dict[str, float], monkeypatch) -> None:
    """P1, G6: depth k takes about n/(k+1) forwards, also where side branches are right."""
    target = double()
    monkeypatch.setattr(target, "eos_ids", set())
    answers = [
        Speculator(target).generate(ids, max_new_tokens=41, **settings).token_ids[0]
        for ids in PROMPTS
    ]
    oracle = Scripted(list(zip(PROMPTS, answers, strict=True)), max_depth=4, side=side)
    out = Speculator(target, oracle).generate(PROMPTS, max_new_tokens=41, **settings)
    assert out.token_ids == answers
    assert out.stats.forwards == 1 + 40 / 5
    assert out.stats.tokens_per_round == 5.0
    assert out.stats.acceptance_by_depth == [1.0] * 4


def test_a_wrong_drafter_costs_no_more_than_plain() -> None:
    target = tiny()
    out = Speculator(target, script(target, pattern=[0])).generate(PROMPTS[0], max_new_tokens=20)
    assert out.token_ids == plain(target, PROMPTS[:1], 20)
    assert out.stats.forwards == 20
    assert out.stats.tokens_per_round == 1.0


def test_counts_of_a_known_pattern_that_the_limit_cuts() -> None:
    """P3: six rounds that accept 2, 0, 3, 1, 4 and 4, the last one cut after 2 of its 5 tokens.

    The prefill gives 1 token, the rounds 3 + 1 + 4 + 2 + 5 + 2 = 17: 18 in all, 17/6 a round.
    """
    target = tiny()
    drafter = script(target, pattern=[2, 0, 3, 1, 4, 4])
    out = Speculator(target, drafter).generate(PROMPTS[0], max_new_tokens=18)
    assert out.token_ids == plain(target, PROMPTS[:1], 18)
    assert (out.stats.rounds, out.stats.tokens) == (6, 18)
    assert out.stats.tokens_per_round == pytest.approx(17 / 6)
    # The last round has room for one drafted token and the one after it.
    assert out.stats.accepted_by_depth == [5, 3, 2, 1]
    assert out.stats.drafted_by_depth == [6, 5, 5, 5]
    assert out.stats.acceptance_by_depth == pytest.approx([5 / 6, 3 / 5, 2 / 5, 1 / 5])


def test_counts_of_a_block_that_eos_cuts(ending: Any) -> None:
    """Accepted tokens behind the EOS are not counted."""
    target, answer, follow = ending
    oracle = Scripted([(PROMPTS[1], follow)], max_depth=5)
    out = Speculator(target, oracle).generate(PROMPTS[1], max_new_tokens=30)
    rounds, last = divmod(len(answer) - 1, 6)
    assert 0 < last < 5
    assert (out.stats.tokens, out.stats.rounds) == (len(answer), rounds + 1)
    assert sum(out.stats.accepted_by_depth) == 5 * rounds + last


def test_counts_are_sums_over_rows() -> None:
    target = tiny()
    patterns = {"pattern": [2, 0, 3, 1]}
    together = Speculator(target, script(target, **patterns)).generate(PROMPTS, max_new_tokens=20)
    rounds = tokens = 0
    for ids in PROMPTS:
        alone = Speculator(target, script(target, **patterns)).generate(ids, max_new_tokens=20)
        rounds, tokens = rounds + alone.stats.rounds, tokens + alone.stats.tokens
    assert (together.stats.rounds, together.stats.tokens, together.stats.rows) == (
        rounds,
        tokens,
        4,
    )
    assert tokens == 80
    assert together.stats.tokens_per_round == (80 - 4) / rounds
    assert set(together.stats.seconds) == {"prefill", "draft", "target", "verify", "host"}
    assert all(seconds >= 0 for seconds in together.stats.seconds.values())
