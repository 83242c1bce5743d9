"""KVBuffer: rows of unlike length, drafts that leave no trace, growth."""

import torch
from torch import Tensor

from selfdraft.heads.kv import GROWTH, ROOM, KVBuffer


def numbered(start: int, tokens: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, 1, tokens, 1] that say which token and row they are of."""
    row = torch.arange(rows)[:, None] * 1000.0
    keys = (row + torch.arange(start, start + tokens))[:, None, :, None]
    return keys, -keys


def seen(buffer: KVBuffer, last: list[int], drafts: Tensor | None = None) -> list[list[float]]:
    """What one query a row sees, as the numbers of its keys."""
    keys, values, mask = buffer.view(torch.tensor(last)[:, None], drafts)
    assert values.equal(-keys)
    return [k[0, :, 0][m[0]].tolist() for k, m in zip(keys, mask, strict=True)]


def test_rows_grow_by_unlike_counts() -> None:
    buffer = KVBuffer.of(*numbered(0, 5), torch.tensor([5, 2]))
    assert seen(buffer, [4, 1]) == [[0, 1, 2, 3, 4], [1000, 1001]]
    buffer = buffer.append(*numbered(50, 3), torch.tensor([1, 3]))
    assert buffer.length_B.tolist() == [6, 5]
    assert seen(buffer, [5, 4]) == [[0, 1, 2, 3, 4, 50], [1000, 1001, 1050, 1051, 1052]]
    assert seen(buffer, [3, 0]) == [[0, 1, 2, 3], [1000]]
    assert seen(buffer.select(torch.tensor([1])), [4]) == [[1000, 1001, 1050, 1051, 1052]]


def test_a_draft_is_seen_by_its_own_and_touches_nothing() -> None:
    buffer = KVBuffer.of(*numbered(0, 3), torch.tensor([3, 1]))
    buffer.draft(*numbered(70, 2), 0)
    buffer.draft(*numbered(80, 1), 2)
    mask = torch.tensor([[[True, False, True]], [[False, True, True]]])
    assert seen(buffer, [2, 0], mask) == [[70, 80, 0, 1, 2], [1071, 1080, 1000]]
    assert seen(buffer, [2, 0]) == [[0, 1, 2], [1000]]


def test_an_old_buffer_still_shows_what_it_showed() -> None:
    old = KVBuffer.of(*numbered(0, 3), torch.tensor([3, 2]))
    new = old.append(*numbered(50, 2), torch.tensor([2, 1]))
    old.draft(*numbered(70, 1), 0)
    assert seen(old, [2, 1]) == [[0, 1, 2], [1000, 1001]]
    assert seen(new, [4, 2]) == [[0, 1, 2, 50, 51], [1000, 1001, 1050]]


def test_growth_of_either_part_moves_nothing() -> None:
    buffer = KVBuffer.of(*numbered(0, 3), torch.tensor([3, 3]))
    buffer.draft(*numbered(500, ROOM), 0)
    many, wide = 2 * GROWTH, 3 * ROOM
    buffer.draft(*numbered(600, wide - ROOM), ROOM)
    buffer = buffer.append(*numbered(3, many), torch.tensor([many, many - 1]))
    assert seen(buffer, [many + 2, many + 1]) == [
        list(range(many + 3)),
        list(range(1000, 1000 + many + 2)),
    ]
    all_drafts = torch.ones(2, 1, wide, dtype=torch.bool)
    expected = [*range(500, 500 + ROOM), *range(600, 600 + wide - ROOM), 0.0]
    assert seen(buffer, [0, 0], all_drafts)[0] == expected


def test_what_lies_before_the_first_is_seen_by_itself_alone() -> None:
    buffer = KVBuffer.of(*numbered(0, 5), torch.tensor([5, 1]), first=2)
    assert seen(buffer, [4, 0]) == [[2, 3, 4], [1000]]
    buffer.draft(*numbered(70, 1), 0)
    assert seen(buffer, [4, 0], torch.ones(2, 1, 1, dtype=torch.bool)) == [[70, 2, 3, 4], [1070]]
