"""Draft: shape, paths and the mask of trees; Plan."""

import pytest
import torch

from selfdraft.heads import Draft, Plan

# Two rows: a tree of 5 nodes, and a chain of 3 that is padded.
TREE = Draft(
    ids_BN=torch.tensor([[9, 1, 2, 3, 4], [8, 5, 6, 0, 0]]),
    parent_BN=torch.tensor([[-1, 0, 0, 2, 3], [-1, 0, 1, 0, 0]]),
    drawn_BN=torch.zeros(2, 5, dtype=torch.bool),
    valid_BN=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
)


def test_tree_is_read_off_its_parents() -> None:
    assert TREE.parents == [[-1, 0, 0, 2, 3], [-1, 0, 1]]
    assert TREE.depths == [[0, 1, 1, 2, 3], [0, 1, 2]]
    assert TREE.children == [[[1, 2], [], [3], [4], []], [[1], [2], []]]
    assert TREE.path(0, 4) == [0, 2, 3, 4]
    assert TREE.path(1, 2) == [0, 1, 2]
    assert not TREE.is_chain


def test_ancestors_are_the_paths() -> None:
    mask = TREE.ancestors()
    for row in range(2):
        for node in range(5):
            inside = node < len(TREE.parents[row])
            expected = TREE.path(row, node) if inside else [node]
            assert mask[row, node].nonzero()[:, 0].tolist() == sorted(expected)


@pytest.mark.parametrize("ragged", [False, True])
def test_chain(ragged: bool) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    valid = torch.tensor([[True, True, True], [True, True, not ragged]])
    draft = Draft.chain(ids, valid_BN=valid)
    assert draft.is_chain
    assert not draft.drawn_BN.any()
    assert draft.parents == [[-1, 0, 1], [-1, 0] if ragged else [-1, 0, 1]]
    last = [False, False, True] if ragged else [True, True, True]
    assert draft.ancestors()[1].tolist() == [[True, False, False], [True, True, False], last]
    assert draft.ancestors()[0].equal(torch.ones(3, 3, dtype=torch.bool).tril())


def test_chain_with_a_law_is_drawn_but_for_its_root() -> None:
    draft = Draft.chain(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, 7) / 7)
    assert draft.drawn_BN.tolist() == [[False, True, True]]


def test_root_is_the_empty_draft() -> None:
    draft = Draft.root(torch.tensor([3, 4]))
    assert draft.ids_BN.tolist() == [[3], [4]]
    assert draft.parents == [[-1], [-1]]


@pytest.mark.parametrize(("depth", "cap", "left"), [(4, 2, 2), (2, 4, 2), (4, 0, 0), (4, -1, 0)])
def test_plan_is_capped(depth: int, cap: int, left: int) -> None:
    assert Plan(depth).capped(cap) == Plan(left)


def test_plan_is_shared_among_rows() -> None:
    assert Plan(4, tokens=12).shared(2) == Plan(4, tokens=12)
    assert Plan(4, tokens=12).shared(4).depth == 2
    assert Plan(4, tokens=12).shared(12).depth == 0
    assert Plan(4, nodes=9, tokens=16).shared(4).nodes == 3
    assert Plan(4, nodes=9, tokens=16).shared(16).depth == 0
    assert Plan(4, nodes=9).shared(64) == Plan(4, nodes=9)


def test_a_node_costs_more_beside_more_rows() -> None:
    assert Plan(worth=0.1).priced(1) == Plan(worth=0.1)
    assert Plan(worth=0.1).priced(9).worth == pytest.approx(0.9 / 2.2)
    assert Plan(worth=0.9).priced(9).worth == pytest.approx(0.9)


def test_a_row_is_cut_where_its_own_room_ends() -> None:
    short = TREE.shortened([1, 2])
    assert short.tokens == [[9, 1, 2], [8, 5, 6]]
    assert TREE.shortened([3, 2]) is TREE


def test_what_is_known_of_nodes_is_cut_with_them() -> None:
    draft = Draft.points(
        TREE.tokens, TREE.parents, chances=[[1, 0.5, 0.4, 0.3, 0.2], [1, 0.6, 0.1]]
    )
    draft.sources = [[0, 1, 2, 2, 3], [0, 1, 1]]
    short = draft.shortened([1, 1])
    assert short.chances == [[1, 0.5, 0.4], [1, 0.6]]
    assert short.sources == [[0, 1, 2], [0, 1]]
