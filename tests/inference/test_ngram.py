"""n-gram drafting: the index against a search of the text, and what is proposed."""

from __future__ import annotations

import random
import time

import pytest
import torch

from selfdraft.heads import Plan
from selfdraft.inference.ngram import ACCEPTED, RECENT, NGram, NGramIndex


def searched(text: list[int], min_n: int, max_n: int) -> list[tuple[int, int]]:
    """`NGramIndex.matches`, by looking through the whole text."""
    found, seen = [], set()
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        suffix = text[-n:]
        places = [i for i in range(n, len(text)) if text[i - n : i] == suffix]
        for place in reversed(places[-RECENT:]):
            if place not in seen:
                seen.add(place)
                found.append((n, place))
    return found


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3)])
def test_index_is_a_search(min_n: int, max_n: int) -> None:
    rng = random.Random(0)
    index, text = NGramIndex([], min_n, max_n), []
    for _ in range(120):
        new = [rng.randrange(4) for _ in range(rng.choice([1, 1, 3]))]
        index.extend(new)
        text += new
        assert list(index.matches()) == searched(text, min_n, max_n)


def test_a_period_goes_on_past_the_end() -> None:
    index = NGramIndex([5, 1, 2, 3, 1, 2, 3], 1, 4)
    n, place = next(iter(index.matches()))
    assert (n, place) == (3, 4)
    assert index.copied(place, 7) == [1, 2, 3, 1, 2, 3, 1]


def proposed(prompt: list[int], plan: Plan, **fields: int) -> tuple[list[int], list[int]]:
    drafter = NGram(**fields)
    ids = torch.tensor([prompt])
    state = drafter.start(ids, torch.tensor([len(prompt) - 1]), {})
    draft = drafter.propose(state, ids[:, -1], plan, None, None)  # type: ignore[arg-type]
    assert not draft.drawn_BN.any()
    return draft.tokens[0], draft.parents[0]


def test_the_latest_and_longest_match_comes_first() -> None:
    text = [1, 2, 9, 7, 7, 1, 2, 4, 0, 0, 3, 2, 6, 1, 2]
    assert proposed(text, Plan(3), branches=1)[0] == [2, 4, 0, 0]
    ids, parents = proposed(text, Plan(2, nodes=9), branches=3)
    assert sorted(ids[1:4]) == [4, 6, 9]
    assert parents[1:4] == [0, 0, 0]
    assert {(ids[p], ids[n]) for n, p in enumerate(parents) if n > 3} == {(4, 0), (9, 7), (6, 1)}


def test_chances_are_those_of_the_match() -> None:
    """Each token copied rightly would make the match one longer."""
    drafter, ids = NGram(branches=2), torch.tensor([[8, 1, 2, 5, 6, 0, 1, 2]])
    state = drafter.start(ids, torch.tensor([7]), {})
    draft = drafter.propose(state, ids[:, -1], Plan(2), None, None)  # type: ignore[arg-type]
    assert draft.tokens == [[2, 5, 6]]
    first, second = ACCEPTED[1], ACCEPTED[2]
    assert draft.chances == [pytest.approx([1.0, first, first * second])]
    worth = Plan(2, worth=first * 0.99)
    assert drafter.propose(state, ids[:, -1], worth, None, None).tokens == [[2, 5]]  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_the_budget_holds(nodes: int) -> None:
    text = [1, 2, 9, 7, 1, 2, 4, 0, 1, 2]
    assert len(proposed(text, Plan(5, nodes=nodes), branches=4)[0]) == nodes + 1


def test_nothing_repeats_nothing_is_proposed() -> None:
    assert proposed([1, 2, 3, 4], Plan(5)) == ([4], [-1])


def test_the_cost_of_a_round_does_not_grow_with_the_text() -> None:
    rng = random.Random(0)

    def seconds(length: int) -> float:
        index = NGramIndex([rng.randrange(50) for _ in range(length)], 1, 4)
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(50):
                index.extend([rng.randrange(50)])
                list(index.matches())
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(50_000) < 5 * seconds(500)


def test_lengths_that_make_no_sense_are_refused() -> None:
    for min_n, max_n in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="min_n"):
            NGram(min_n=min_n, max_n=max_n)
