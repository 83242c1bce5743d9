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


def test_draws_over_many_blocks_follow_the_law() -> None:
    """A law over 1,000 ids: mass in few blocks, whole blocks empty, the last one partly filled."""
    law = torch.zeros(1000, dtype=torch.float64)
    support = torch.tensor([0, 255, 256, 700, 998, 999])
    law[support] = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.05, 0.3], dtype=torch.float64)
    counts, trials = torch.zeros(1000, dtype=torch.float64), 4000
    for seed in range(trials):
        counts[RowNoise([seed], [3]).categorical(law, 0, 0, Purpose.DRAFT)] += 1 / trials
    # TV <= sqrt((V-1)/N)/2 + sqrt(ln(1/delta)/(2N)) with delta = 1e-6, V the support
    bound = 0.5 * (5 / trials) ** 0.5 + (13.8 / (2 * trials)) ** 0.5
    assert (counts - law).abs().sum() / 2 < bound
    assert counts[law == 0].sum() == 0


@pytest.mark.parametrize("number", [0.0, 0.1, 0.3 - 1e-17, 0.65, 0.95, 1 - 2**-53])
def test_draws_are_the_inverse_of_the_running_sum(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowNoise, "uniform", lambda *key: number)
    generator = torch.Generator().manual_seed(1)
    law = torch.rand(5000, generator=generator, dtype=torch.float64)
    law[::3] = 0
    law[:700] = 0
    law /= law.sum()
    drawn = RowNoise([0], [0]).categorical(law, 0, 0, Purpose.DRAFT)
    below, upto = law[:drawn].sum(), law[: drawn + 1].sum()
    assert law[drawn] > 0
    assert below - 1e-12 <= number <= upto + 1e-12
