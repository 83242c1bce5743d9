"""The acceptance rule: textbook numbers, and its exact law by enumeration on random laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from calls import Calls
from enumeration import Tape, TapeNoise, distance, exact_law
from torch import Tensor

from selfdraft.heads import Draft
from selfdraft.inference import verifier
from selfdraft.inference.verifier import verify

Law = Callable[[tuple[int, ...]], Tensor]
TOLERANCE, BIASED = 1e-12, 1e-3


class Recorder:
    """Noise that takes its answers from lists and keeps what it was asked."""

    def __init__(self, *answers: bool, pick: int = 0) -> None:
        self.answers, self.pick = list(answers), pick
        self.asked: list[float] = []
        self.laws: list[list[float]] = []

    def bernoulli(self, probability: float, row: int, node: int) -> bool:
        self.asked.append(probability)
        return self.answers.pop(0)

    def categorical(self, law_V: Tensor, row: int, node: int, purpose: Any) -> int:
        self.laws.append(law_V.tolist())
        return self.pick


def laws(*rows: list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64)


def test_textbook_acceptance_and_residual() -> None:
    """p = 0.1 against q = 0.5 accepts with 0.2; rejected, it redraws with 0.75, 0, 0.25."""
    q = laws([0.2, 0.5, 0.3], [0.0, 0.0, 0.0])
    p = laws([0.5, 0.1, 0.4], [0.6, 0.3, 0.1])
    noise = Recorder(False, pick=2)
    (verdict,) = verify(Draft.chain(torch.tensor([[7, 1]]), q), p, noise)
    assert noise.asked == pytest.approx([0.2], abs=1e-15)
    assert noise.laws[0] == pytest.approx([0.75, 0.0, 0.25], abs=1e-15)
    assert (verdict.path, verdict.tokens) == ([0], [2])


def test_textbook_bonus() -> None:
    """All accepted: the bonus token comes from the last node's own law."""
    q = laws([0.2, 0.5, 0.3], [0.0, 0.0, 0.0])
    p = laws([0.5, 0.1, 0.4], [0.6, 0.3, 0.1])
    noise = Recorder(True, pick=0)
    (verdict,) = verify(Draft.chain(torch.tensor([[7, 1]]), q), p, noise)
    assert noise.laws == [[0.6, 0.3, 0.1]]
    assert (verdict.path, verdict.tokens) == ([0, 1], [1, 0])


def test_more_probable_than_drafted_is_always_accepted() -> None:
    noise = Recorder(True)
    q, p = laws([0.2, 0.8], [0.0, 0.0]), laws([0.6, 0.4], [0.5, 0.5])
    verify(Draft.chain(torch.tensor([[1, 0]]), q), p, noise)
    assert noise.asked == [1.0]


def test_a_point_is_accepted_with_its_own_probability() -> None:
    noise = Recorder(False)
    verify(Draft.chain(torch.tensor([[7, 1]])), laws([0.5, 0.2, 0.3], [1.0, 0.0, 0.0]), noise)
    assert noise.asked == [0.2]
    assert noise.laws[0] == pytest.approx([0.625, 0.0, 0.375], abs=1e-15)


def test_nothing_is_certain_where_there_is_no_law() -> None:
    noise = Recorder(False)
    verify(Draft.chain(torch.tensor([[7, 1]])), torch.full((1, 2, 3), torch.nan), noise)
    assert noise.asked[0] != noise.asked[0]  # NaN, below which no coin falls


@pytest.mark.parametrize("sampled", [False, True])
def test_accepting_a_chain_waits_for_the_device_once(sampled: bool) -> None:
    """No number is fetched for a child alone."""
    q = torch.full((2, 4, 3), 1 / 3) if sampled else None
    draft, p = Draft.chain(torch.tensor([[7, 1, 0, 2]] * 2), q), torch.full((2, 4, 3), 1 / 3)
    with Calls() as calls:
        verdicts = verify(draft, p, Recorder(*[True] * 6))
    assert [verdict.path for verdict in verdicts] == [[0, 1, 2, 3]] * 2
    assert "_local_scalar_dense" not in calls.names


def test_each_row_has_its_own_laws() -> None:
    ids = torch.tensor([[7, 1, 0], [7, 0, 0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    p = torch.tensor([[[0.5, 0.5]] * 3, [[0.25, 0.75], [0.1, 0.9], [1.0, 0.0]]])
    noise = Recorder(True, False, True, pick=1)
    one, two = verify(Draft.chain(ids, valid_BN=valid), p, noise)
    assert noise.asked == pytest.approx([0.5, 0.5, 0.25])
    assert (one.path, one.tokens) == ([0, 1], [1, 1])
    assert (two.path, two.tokens) == ([0, 1], [0, 1])  # its third node pads the row
    assert noise.laws[1] == pytest.approx([0.1, 0.9])


def test_greedy_compares_and_takes_side_branches() -> None:
    draft = Draft(
        torch.tensor([[9, 1, 2, 3, 4]]),
        torch.tensor([[-1, 0, 0, 2, 2]]),
        torch.zeros(1, 5, dtype=torch.bool),
        torch.ones(1, 5, dtype=torch.bool),
    )
    choice = torch.tensor([[2, 0, 4, 0, 8]])
    assert verify(draft, choice, Recorder())[0] == ([0, 2, 4], [2, 4, 8])
    choice[0, 0] = 5
    assert verify(draft, choice, Recorder())[0] == ([0], [5])


def test_leftover_mass_that_rounds_away_is_no_nan() -> None:
    p = torch.tensor([0.25, 0.75, 0.0])
    assert verifier.residual(p, p, 0).tolist() == [0.0, 1.0, 0.0]
    assert verifier.residual(p, p + 1e-20, 1).tolist() == [1.0, 0.0, 0.0]
    assert verifier.without(torch.tensor([0.0, 1.0]), 1).tolist() == [0.0, 1.0]


# -- the law of a round, enumerated --------------------------------------------------------------

# (points, drawn children) of a node at each depth.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "chain sampled": [(0, 1), (0, 1), (0, 1)],
    "chain of points": [(1, 0), (1, 0), (1, 0)],
    "tree of points": [(2, 0), (2, 0)],
    "tree without replacement": [(0, 2), (0, 2)],
    "mixed": [(1, 2), (0, 1)],
    "mixed below points": [(2, 0), (1, 1)],
}
SEEDS = range(8)


def random_law(seed: int, vocab: int) -> Law:
    """A law for each prefix; odd seeds have zeros in their support."""

    @cache
    def law(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**63)
        logits = 2 * torch.randn(vocab, generator=generator, dtype=torch.float64)
        if seed % 2:
            logits[
                torch.randperm(vocab, generator=generator)[: vocab // 3 + (vocab > 3)]
            ] = -torch.inf
        return logits.softmax(0)

    return law


def draft_tree(tape: Tape, q: Law, shape: list[tuple[int, int]]) -> tuple[Draft, list[tuple]]:
    """A drafted tree and the tokens behind the root at each node."""
    prefixes: list[tuple[int, ...]] = [()]
    parents, drawn = [-1], [False]
    node = 0
    while node < len(prefixes):
        prefix = prefixes[node]
        points, draws = shape[len(prefix)] if len(prefix) < len(shape) else (0, 0)
        left = q(prefix).clone()
        tokens = left.argsort(descending=True)[:points].tolist()
        for _ in range(draws):
            if left.sum() > 0:
                token = tape.choose(left.tolist())
                left[token] = 0
                tokens.append(token)
        prefixes += [(*prefix, token) for token in tokens]
        parents += [node] * len(tokens)
        drawn += [rank >= points for rank in range(len(tokens))]
        node += 1
    draft = Draft(
        torch.tensor([[p[-1] if p else 0 for p in prefixes]]),
        torch.tensor([parents]),
        torch.tensor([drawn]),
        torch.ones(1, len(prefixes), dtype=torch.bool),
        torch.stack([q(p) for p in prefixes])[None],
    )
    return draft, prefixes


def target_run(p: Law, tape: Tape, tokens: list[int], length: int) -> tuple[int, ...]:
    """`tokens` pushed to `length` by draws from the target."""
    while len(tokens) < length:
        tokens = [*tokens, tape.choose(p(tuple(tokens)).tolist())]
    return tuple(tokens)


def bias(shape: list[tuple[int, int]], seed: int, vocab: int, change: Any = None) -> float:
    """Distance of a round's law from the target's; `change` damages (draft, laws, noise)."""
    p, q, length = random_law(seed, vocab), random_law(seed + 1000, vocab), len(shape) + 1

    def run(tape: Tape) -> tuple[int, ...]:
        draft, prefixes = draft_tree(tape, q, shape)
        parts = draft, torch.stack([p(prefix) for prefix in prefixes])[None], TapeNoise(tape)
        verdict = verify(*(change(*parts) if change else parts))[0]
        return target_run(p, tape, verdict.tokens, length)

    return distance(exact_law(run), exact_law(lambda tape: target_run(p, tape, [], length)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_is_the_targets(shape: str, seed: int) -> None:
    assert bias(SHAPES[shape], seed, vocab=3) < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [[(0, 1)], [(3, 0)], [(0, 3)], [(2, 2)]], ids=str)
def test_wider_laws(shape: list[tuple[int, int]], seed: int) -> None:
    assert bias(shape, seed, vocab=4 + seed % (5 if shape[0][1] < 3 else 2)) < TOLERANCE


def soft_points(draft: Draft, p: Tensor, noise: Any) -> tuple:
    """Tokens chosen without chance, verified as if they had been drawn from q."""
    draft.drawn_BN[:, 1:] = True
    return draft, p, noise


def shifted(draft: Draft, p: Tensor, noise: Any) -> tuple:
    return draft, p.roll(1, 1), noise


def dropped(draft: Draft, p: Tensor, noise: Any) -> tuple:
    """A drafted token is dropped because it looks improbable."""
    token = int(draft.ids_BN[0, 1])
    if draft.q_BNV[0, 0, token] < 0.3:
        draft = Draft.root(draft.ids_BN[:, 0])
    return draft, p, noise


def eager(draft: Draft, p: Tensor, noise: Any) -> tuple:
    noise.bernoulli = lambda probability, row, node: True
    return draft, p, noise


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ("chain of points", soft_points),
        ("tree of points", soft_points),
        ("chain sampled", shifted),
        ("chain sampled", dropped),
        ("chain sampled", eager),
    ],
)
def test_a_wrong_use_is_caught(shape: str, change: Any) -> None:
    assert any(bias(SHAPES[shape], seed, 3, change) > BIASED for seed in range(4))


@pytest.mark.parametrize(
    ("shape", "name", "wrong"),
    [
        ("chain sampled", "residual", lambda p, q, token: p),
        ("chain sampled", "residual", lambda p, q, token: verifier.without(p, token)),
        ("chain sampled", "residual", lambda p, q, token: (q - p).clamp(min=1e-9)),
        ("tree without replacement", "without", lambda law, token: law),
        ("tree of points", "without", lambda law, token: law),
        ("mixed", "without", lambda law, token: law),
    ],
)
def test_a_wrong_rule_is_caught(shape: str, name: str, wrong: Any, monkeypatch) -> None:
    monkeypatch.setattr(verifier, name, wrong)
    assert any(bias(SHAPES[shape], seed, 3) > BIASED for seed in range(4))
