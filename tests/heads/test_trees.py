"""Growing drafts: best-first trees against brute force, fixed shapes, rows without a law."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from fixtures import batch_of, make_head, spoiled_head, tiny

from selfdraft.heads import HEADS, Draft, Head, Plan
from selfdraft.heads.merging import merge
from selfdraft.heads.shapes import (
    check_tree,
    first_rates,
    likely_tree,
    planned_tree,
    tree_chances,
)
from selfdraft.inference.noise import RowNoise
from selfdraft.inference.sampling import RowSampling
from selfdraft.inference.settings import Settings

ROOT = torch.tensor([7, 3])
TREES = sorted(kind for kind in HEADS if HEADS[kind].trees)


def proposed(head: Head, plan: Plan, root_B: torch.Tensor = ROOT, **settings: Any) -> Draft:
    """A draft for two rows after a prompt of 8 and 6 tokens."""
    batch = batch_of([9, 9])
    target = tiny()
    features = target.features(batch["ids"], batch["length"], head.taps)
    state = head.start(batch["ids"], torch.tensor([8, 6]), features)
    history = [ids[: n + 1] for ids, n in zip(batch["ids"].tolist(), [8, 6], strict=True)]
    sampling = RowSampling(Settings(**settings), history)
    with torch.no_grad():
        return head.propose(state, root_B, plan, sampling, RowNoise([0, 1], [9, 7]))


def chances(head: Head, row: int, plan_depth: int, top: int) -> dict[tuple[int, ...], float]:
    """Log probability of every path over the `top` likeliest tokens of each node."""
    result: dict[tuple[int, ...], float] = {}
    paths: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    batch, target = batch_of([9, 9]), tiny()
    features = target.features(batch["ids"], batch["length"], head.taps)
    state = head.start(batch["ids"], torch.tensor([8, 6]), features)
    for _ in range(plan_depth):
        below = []
        for path, score in paths:
            laws = law_after(head, state, row, path).log_softmax(-1)
            for value, token in zip(*(t.tolist() for t in laws.topk(top)), strict=True):
                result[(*path, token)] = score + value
                below.append(((*path, token), score + value))
        paths = below
    return result


@torch.no_grad()
def law_after(head: Head, state: Any, row: int, path: tuple[int, ...]) -> torch.Tensor:
    """Logits over target ids after `path`, one chain at a time."""
    memo: dict[str, torch.Tensor] = {}
    one = state.select(torch.tensor([row]))
    for k in range(len(path) + 1):
        tokens = torch.tensor([[[int(ROOT[row]), *path[:k]]]])
        hidden = head.step(one, tokens, torch.zeros(1, 1, dtype=torch.long), memo)
    logits = head.draft_logits(hidden, tokens)[0, 0]
    full = torch.full((head.spec.vocab_size,), -math.inf)
    full[slice(None) if head.draft_ids is None else head.draft_ids] = logits
    return full


def paths_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    ids = draft.tokens[row]
    return [tuple(ids[n] for n in draft.path(row, node)[1:]) for node in range(1, len(ids))]


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("nodes", [1, 5, 11])
def test_best_first_keeps_the_likeliest_paths(kind: str, nodes: int) -> None:
    head = make_head(kind, tiny().spec, depth=3, draft_ids=list(range(0, 300, 7)))
    draft = proposed(head, Plan(3, nodes=nodes))
    for row in range(2):
        known = chances(head, row, 3, 8)
        best = sorted(known.values(), reverse=True)[:nodes]
        got = [known[path] for path in paths_of(draft, row)]
        assert sorted(got, reverse=True) == pytest.approx(best, abs=1e-4)
        assert len(set(paths_of(draft, row))) == nodes
    assert draft.depths[0] == sorted(draft.depths[0])
    assert not draft.drawn_BN.any()


@pytest.mark.parametrize("kind", TREES)
def test_one_node_a_level_is_the_chain(kind: str) -> None:
    head = make_head(kind, tiny().spec, depth=3)
    chain = proposed(head, Plan(3))
    tree = proposed(head, Plan(3, tree=((0,), (0, 0), (0, 0, 0))))
    assert chain.tokens == tree.tokens
    assert chain.is_chain
    assert tree.is_chain


@pytest.mark.parametrize("kind", TREES)
def test_a_processor_acts_on_every_node(kind: str) -> None:
    """With no token allowed twice, no path of a tree holds a token of its own prefix."""
    head = make_head(kind, tiny().spec, depth=3)
    draft = proposed(head, Plan(3, nodes=9), repetition_penalty=1e6)
    for row in range(2):
        for path in paths_of(draft, row):
            assert len(set(path)) == len(path)


@pytest.mark.parametrize("kind", TREES)
def test_drawn_siblings_differ_and_come_from_their_parents_law(kind: str) -> None:
    head = make_head(kind, tiny().spec, depth=2)
    tree = ((0,), (1,), (2,), (0, 0), (0, 1))
    draft = proposed(head, Plan(2, tree=tree), do_sample=True, top_k=4)
    assert draft.q_BNV is not None
    for row in range(2):
        for node, children in enumerate(draft.children[row]):
            tokens = [draft.tokens[row][child] for child in children]
            assert len(set(tokens)) == len(tokens)
            assert all(draft.q_BNV[row, node, token] > 0 for token in tokens)
        assert draft.drawn_BN[row, 1 : len(draft.tokens[row])].all()


def test_a_law_of_two_tokens_has_two_children() -> None:
    head = make_head("hydra", tiny().spec, depth=1)
    draft = proposed(head, Plan(1, tree=((0,), (1,), (2,), (3,))), do_sample=True, top_k=2)
    assert [len(tokens) for tokens in draft.tokens] == [3, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("plan", [Plan(2), Plan(2, nodes=5), Plan(2, tree=((0,), (1,)))])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_without_a_law_drafts_nothing(value: float, plan: Plan, sampled: bool) -> None:
    head = spoiled_head("hydra", tiny().spec, value)
    draft = proposed(head, plan, do_sample=sampled)
    assert draft.tokens == [[7], [3]]


def test_confidence_stops_behind_the_unlikely_token() -> None:
    head = make_head("hydra", tiny().spec, depth=3, scale=0)
    whole = proposed(head, Plan(3, nodes=12))
    stopped = proposed(head, Plan(3, nodes=12, confidence=0.999))
    assert max(whole.depths[0]) > 1
    assert set(stopped.depths[0]) == {0, 1}
    assert proposed(head, Plan(3, confidence=0.999)).depths[0] == [0, 1]


@pytest.mark.parametrize("kind", TREES)
def test_what_is_not_worth_it_is_left_out(kind: str) -> None:
    head = make_head(kind, tiny().spec, depth=3)
    whole = proposed(head, Plan(3, nodes=12))
    assert whole.chances is not None
    floor = sorted(whole.chances[0])[4]
    kept = proposed(head, Plan(3, nodes=12, worth=floor))
    assert kept.chances is not None
    for row in range(2):
        expected = [
            path
            for path, c in zip(paths_of(whole, row), whole.chances[row][1:], strict=True)
            if c >= floor
        ]
        assert paths_of(kept, row) == expected
    drawn = proposed(head, Plan(3, nodes=12, worth=0.1), do_sample=True)
    assert drawn.parents[0] == drawn.parents[1]  # of a drawn tree the shape alone decides
    assert 1 < len(drawn.parents[0]) < 13


def test_a_shape_of_which_nothing_is_worth_it_is_the_root() -> None:
    head = make_head("hydra", tiny().spec, depth=3)
    for head.trees in (True, False):
        draft = proposed(head, Plan(3, nodes=9, worth=0.6), do_sample=True)
        assert draft.tokens == [[7], [3]]


def test_likely_tree_grows_by_adding_nodes() -> None:
    trees = [set(likely_tree(n, 3)) for n in range(1, 20)]
    assert all(small < large for small, large in itertools.pairwise(trees))
    for tree in trees:
        check_tree(tuple(tree))


MEASURED = {
    0.05: set(),
    0.1: {(0,)},
    0.37: {(0,), (1,), (0, 0)},
    0.5: {(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)},
    0.9: {(0,), (0, 0), (0, 0, 0)},
}


@pytest.mark.parametrize("rate", MEASURED)
def test_a_shape_is_as_large_as_what_was_measured_pays(rate: float) -> None:
    tree = planned_tree(Plan(3, nodes=16, worth=0.08), 3, True, (rate,) * 3)
    assert set(tree) == MEASURED[rate]
    check_tree(tree)
    siblings = tree_chances(tuple((rank,) for rank in range(20)), (rate,))[1:]
    assert sum(siblings) <= 1


def test_rates_are_of_each_depth() -> None:
    assert likely_tree(3, 3, (0.9, 0.2)) == ((0,), (0, 0), (0, 0, 0))
    assert likely_tree(3, 3, (0.2, 0.1)) == ((0,), (1,), (2,))
    assert tree_chances(((0,), (1,), (0, 0), (0, 0, 0)), (0.4, 0.3)) == pytest.approx(
        [1, 0.4, 0.16, 0.12, 0.06]
    )


def test_rates_come_from_how_far_drawn_chains_are_accepted() -> None:
    assert first_rates([0.4, 0.2, None, 0.1, 0.0, 0.0]) == (0.4, 0.5, 0.5, 0.5, 0.0, 0.5)
    assert first_rates([0.5, 0.6]) == (0.5, 1.0)
    assert first_rates([]) == ()


def test_drawn_nodes_are_estimated_by_rates_and_chosen_ones_are_not() -> None:
    head = make_head("hydra", tiny().spec, depth=3)
    head.rates = (0.37, 0.37, 0.37)
    drawn = proposed(head, Plan(3, nodes=16, worth=0.08), do_sample=True)
    assert drawn.parents == [[-1, 0, 0, 1]] * 2
    assert drawn.chances is not None
    assert drawn.chances[0] == pytest.approx([1, 0.37, 0.148, 0.1369])
    chosen = proposed(head, Plan(3, tree=((0,), (1,))))
    assert chosen.chances == [[1, 0.5, 0.2]] * 2


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.37, 1 / 3])
def test_all_that_is_drawn_stays_in_a_merge(rate: float) -> None:
    """A node that is worth just what is asked is not lost to rounding."""
    head = make_head("hydra", tiny().spec, depth=3)
    head.rates = (rate, rate, rate)
    for worth in (0.08, rate, rate**2, rate**3, rate * 0.4, rate * 0.16, rate * rate * 0.4):
        plan = Plan(3, nodes=16, worth=worth)
        drawn = proposed(head, plan, do_sample=True)
        merged = merge([Draft.root(ROOT), drawn], ["ngram", "hydra"], plan)
        assert (merged.tokens, merged.parents) == (drawn.tokens, drawn.parents)
        assert len(drawn.tokens[0]) > 1


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (((0,), (0,)), "twice"),
        (((1,),), "sibling"),
        (((0, 0),), "parent"),
        (((-1,),), "ranks"),
        (((),), "ranks"),
    ],
)
def test_what_is_no_tree(tree: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_tree(tree)
