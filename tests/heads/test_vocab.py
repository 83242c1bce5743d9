"""How a draft vocabulary is chosen from the counts of the data."""

import pytest
import torch

from selfdraft.heads.vocab import coverage, draft_size, most_frequent

COUNTS = torch.tensor([5, 0, 40, 5, 50, 0])


@pytest.mark.parametrize(
    ("most", "share", "size"),
    [
        (None, None, 6),
        (3, None, 3),
        (9, None, 6),
        (None, 0.5, 1),
        (None, 0.51, 2),
        (None, 0.9, 2),
        (None, 1.0, 4),
        (3, 1.0, 3),
        (3, 0.2, 1),
    ],
)
def test_size_by_number_and_by_coverage(most, share, size) -> None:
    assert draft_size(COUNTS, most, share) == size


@pytest.mark.parametrize("share", [0.01, 0.3, 0.77, 0.9, 0.999, 1.0])
def test_the_size_is_the_smallest_that_covers(share: float) -> None:
    counts = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(1))
    size = draft_size(counts, None, share)
    assert coverage(counts, most_frequent(counts, size)) >= share
    assert size == 1 or coverage(counts, most_frequent(counts, size - 1)) < share


def test_most_frequent_ids_are_sorted_and_the_first_of_equals_stay() -> None:
    assert most_frequent(COUNTS, 3).tolist() == [0, 2, 4]
    assert most_frequent(COUNTS, 99).tolist() == list(range(6))
    assert coverage(COUNTS, torch.tensor([2, 4])) == 0.9


def test_no_data() -> None:
    none = torch.zeros(4, dtype=torch.long)
    assert draft_size(none, 3, 0.9) == 1
    assert coverage(none, most_frequent(none, 2)) == 0
