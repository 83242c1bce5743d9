"""Merging drafts: one tree of several drafters' nodes, and which of them are kept."""

import pytest
import torch

from selfdraft.heads import Draft, Plan
from selfdraft.heads.merging import merge

POINTS = Draft.points([[9, 1, 2], [8, 5]], [[-1, 0, 1], [-1, 0]])


def test_equal_points_become_one() -> None:
    other = Draft.points([[9, 3, 1, 2, 4], [8]], [[-1, 0, 0, 2, 2], [-1]])
    merged = merge([POINTS, other], ["a", "b"], Plan())
    assert merged.tokens == [[9, 1, 3, 2, 4], [8, 5]]
    assert merged.parents == [[-1, 0, 0, 1, 1], [-1, 0]]
    assert merged.sources == [[0, 3, 2, 3, 2], [0, 1]]
    assert merged.q_BNV is None
    assert not merged.drawn_BN.any()


def test_drawn_nodes_stay_beside_equal_points() -> None:
    law = torch.rand(2, 3, 12)
    drawn = Draft.chain(torch.tensor([[9, 1, 6], [8, 7, 7]]), law)
    merged = merge([POINTS, drawn], ["a", "b"], Plan())
    assert merged.tokens == [[9, 1, 1, 2, 6], [8, 5, 7, 7]]
    assert merged.parents == [[-1, 0, 0, 1, 2], [-1, 0, 0, 2]]
    assert merged.drawn_BN[0].tolist() == [False, False, True, False, True]
    assert merged.q_BNV is not None
    assert merged.q_BNV[0, 0].equal(law[0, 0])
    assert merged.q_BNV[0, 2].equal(law[0, 1])
    assert merged.q_BNV[1, 2].equal(law[1, 1])


def test_two_drawn_laws_for_a_node_are_refused() -> None:
    drawn = Draft.chain(torch.tensor([[9, 1]]), torch.rand(1, 2, 12))
    with pytest.raises(ValueError, match="at most one"):
        merge([drawn, drawn], ["a", "b"], Plan())


def estimated(tokens: list[int], chances: list[float]) -> Draft:
    """One row: a chain of points with estimates."""
    parents = list(range(-1, len(tokens) - 1))
    return Draft.points([tokens], [parents], chances=[chances])


def test_the_likeliest_nodes_are_kept() -> None:
    one = estimated([9, 1, 2, 3], [1.0, 0.6, 0.5, 0.1])
    two = estimated([9, 4, 5], [1.0, 0.3, 0.2])
    for nodes, kept in ((1, [9, 1]), (2, [9, 1, 2]), (4, [9, 1, 4, 2, 5]), (9, [9, 1, 4, 2, 5, 3])):
        assert merge([one, two], ["a", "b"], Plan(nodes=nodes)).tokens == [kept]
    assert merge([one, two], ["a", "b"], Plan(worth=0.25)).tokens == [[9, 1, 4, 2]]


def test_drafters_that_agree_are_believed_more() -> None:
    """Each alone thinks 0.5 of token 1; together they are wrong in a quarter of the cases."""
    one, two = estimated([9, 1], [1.0, 0.5]), estimated([9, 1, 2], [1.0, 0.5, 0.25])
    merged = merge([one, two], ["a", "b"], Plan(worth=0.37))
    assert merged.tokens == [[9, 1, 2]]  # 0.75, and half of it
    assert merge([two], ["b"], Plan(worth=0.37)).tokens == [[9, 1]]


def test_siblings_share_what_their_parent_has() -> None:
    one, two = estimated([9, 1], [1.0, 0.9]), estimated([9, 2], [1.0, 0.9])
    assert merge([one, two], ["a", "b"], Plan(worth=0.49)).tokens == [[9, 1, 2]]
    assert merge([one, two], ["a", "b"], Plan(worth=0.51)).tokens == [[9]]
