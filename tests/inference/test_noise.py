"""Keyed random numbers: no coin twice, equal keys equal numbers, nothing outside the support."""

import itertools

import pytest
import torch

from selfdraft.heads.protocols import Purpose
from selfdraft.inference.noise import RowNoise


def test_each_part_of_the_key_gives_another_number() -> None:
    numbers = set()
    for seed, length, node, purpose in itertools.product(range(4), range(4), range(4), Purpose):
        number = RowNoise([seed], [length]).uniform(0, node, purpose)
        assert 0 <= number < 1
        numbers.add(number)
    assert len(numbers) == 4 * 4 * 4 * len(Purpose)


def test_a_number_does_not_depend_on_the_row_it_stands_in() -> None:
    one = RowNoise([7], [30])
    many = RowNoise([1, 2, 7], [5, 6, 30])
    assert one.uniform(0, 3, Purpose.ACCEPT) == many.uniform(2, 3, Purpose.ACCEPT)
    law = torch.tensor([0.2, 0.5, 0.3])
    drawn = [n.categorical(law, r, 1, Purpose.DRAFT) for n, r in ((one, 0), (many, 2))]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**80, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= RowNoise([seed], [0]).uniform(0, 0, Purpose.DRAFT) < 1


@pytest.mark.parametrize("number", [0.0, 0.2, 0.5, 1 - 2**-53])
def test_only_the_support_is_drawn(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowNoise, "uniform", lambda *key: number)
    law = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.6, 0.0])
    drawn = RowNoise([0], [0]).categorical(law, 0, 0, Purpose.RESIDUAL)
    assert drawn == (1 if number < 0.3 else 4)
    assert RowNoise([0], [0]).bernoulli(1.0, 0, 0)
    assert not RowNoise([0], [0]).bernoulli(0.0, 0, 0)


def test_frequencies() -> None:
    law, counts, trials = torch.tensor([0.1, 0.0, 0.6, 0.3]), torch.zeros(4), 4000
    for seed in range(trials):
        counts[RowNoise([seed], [9]).categorical(law, 0, 2, Purpose.DRAFT)] += 1 / trials
    assert (counts - law).abs().sum() / 2 < 0.05
    accepted = sum(RowNoise([seed], [9]).bernoulli(0.25, 0, 2) for seed in range(trials))
    assert abs(accepted / trials - 0.25) < 0.04
