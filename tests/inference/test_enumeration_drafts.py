"""The exact joint law of several rounds for every form of draft, and verifiers that are wrong.

On a table of random laws (tests/tables.py), so that eight seeds of each form take seconds; half of
the seeds have zeros in their support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import Tape, TapeNoise, decode_law, distance, exact_law, law_of, target_law
from fixtures import make_head
from tables import RandomPoints, TableTarget

from selfdraft.heads import HEADS, Draft, Plan
from selfdraft.heads.protocols import Drafter
from selfdraft.inference import verifier
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram

TOLERANCE, BIASED = 1e-12, 1e-3
SEEDS = range(8)
TREE = ((0,), (1,), (0, 0))
PROMPT = [1, 2, 1]


def table(vocab: int, seed: int) -> TableTarget:
    return TableTarget(vocab, seed, zeros=0.4 if seed % 2 else 0.0)


def head(target: TableTarget, kind: str, seed: int, depth: int = 2, **fields: Any) -> Any:
    return make_head(kind, target.spec, depth=depth, scale=0.5, seed=seed, **fields)


def widened(target: TableTarget, kind: str, seed: int, **fields: Any) -> Any:
    """A head that drafts one id, and those of each row's own text."""
    made = head(target, kind, seed, draft_ids=[0], **fields)
    made.widen = True
    return made


def rated(target: TableTarget, seed: int) -> Any:
    """A head of which held-out rows have said how often its drawn tokens are accepted."""
    made = head(target, "hydra", seed)
    made.rates = (0.7, 0.3)
    return made


def points(target: TableTarget, seed: int) -> Drafter:
    return RandomPoints(target.vocab, seed)


def merged(target: TableTarget, seed: int) -> Drafter:
    return Merged([points(target, seed), head(target, "hydra", seed)])


CASES: dict[str, tuple[Callable[[TableTarget, int], Drafter], Plan, dict[str, Any]]] = {
    "chain": (lambda t, s: head(t, "hydra", s), Plan(2), {}),
    "medusa-chain-top-k": (lambda t, s: head(t, "medusa", s), Plan(2), {"top_k": 2}),
    "confidence-stop": (lambda t, s: head(t, "hydra", s), Plan(2, confidence=0.4), {}),
    "drawn-tree": (lambda t, s: head(t, "hydra", s), Plan(2, tree=TREE), {}),
    "drawn-tree-top-p": (
        lambda t, s: head(t, "medusa", s),
        Plan(2, tree=TREE),
        {"top_p": 0.8, "repetition_penalty": 1.6},
    ),
    "drawn-tree-of-a-budget": (lambda t, s: head(t, "hydra", s), Plan(2, nodes=3), {}),
    "drawn-tree-of-rates": (rated, Plan(2, nodes=4, worth=0.1), {}),
    "points": (points, Plan(2), {}),
    "points-penalty": (points, Plan(2), {"repetition_penalty": 2.0, "top_k": 3}),
    "ngram": (lambda t, s: NGram(branches=2), Plan(3, nodes=4), {}),
    "widened-tree": (lambda t, s: widened(t, "hydra", s), Plan(2, tree=TREE), {}),
    "widened-merged-top-k": (
        lambda t, s: Merged([points(t, s), widened(t, "medusa", s, prior=2)]),
        Plan(2),
        {"top_k": 2},
    ),
    "prior-tree": (lambda t, s: head(t, "medusa", s, prior=2), Plan(2, tree=TREE), {}),
    "prefix-attention": (lambda t, s: head(t, "hydra", s, prefix_attention=True), Plan(2), {}),
    "prefix-attention-tree": (
        lambda t, s: head(t, "hydra", s, prefix_attention=True),
        Plan(2, tree=TREE),
        {},
    ),
    "low-rank-tree": (lambda t, s: head(t, "hydra", s, low_rank=2), Plan(2, tree=TREE), {}),
    "merged-tree-of-rates": (
        lambda t, s: Merged([points(t, s), rated(t, s)]),
        Plan(1, nodes=4, worth=0.1),
        {},
    ),
    "merged-chain": (merged, Plan(2), {}),
    "merged-tree": (merged, Plan(1, tree=((0,), (1,))), {"top_p": 0.9}),
    "merged-ngram": (
        lambda t, s: Merged([NGram(max_depth=2), head(t, "medusa", s, depth=1)]),
        Plan(2, nodes=4),
        {"top_k": 2},
    ),
}
EVERY_KIND = {
    f"drawn-tree-{kind}": (lambda t, s, kind=kind: head(t, kind, s), Plan(2, tree=TREE), {})
    for kind in sorted(HEADS)
}
EVERY_KIND |= {
    f"{name}-{kind}": (lambda t, s, kind=kind, make=make: make(t, kind, s), Plan(2), {})
    for kind in sorted(HEADS)
    for name, make in {
        "widened": widened,
        "prior": lambda t, k, s: head(t, k, s, prior=2),
        "low-rank": lambda t, k, s: head(t, k, s, low_rank=2, prior=1, draft_ids=[0, 2]),
    }.items()
}


def run(
    patch: Any, case: str, seed: int, prompts: list[list[int]] | None = None, tokens: int = 4
) -> float:
    """Distance of the loop's law from the target's."""
    make, plan, settings = (CASES | EVERY_KIND)[case]
    target = table(3, seed)
    drafter = make(target, seed)
    prompts = prompts or [PROMPT]
    seeds: dict[str, Any] = {"seed": [7 * (i + 1) for i in range(len(prompts))]}
    got = decode_law(
        patch, target, drafter, prompts, max_new_tokens=tokens, plan=plan, **seeds, **settings
    )
    expected = target_law(target, prompts, tokens, law_of(**settings))
    return distance(got, expected)


# A slice of the seeds, half of it with zeros; `make proof` runs them all.
SLICE = [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.proof) for seed in SEEDS]


@pytest.mark.parametrize("seed", SLICE)
@pytest.mark.parametrize("case", CASES)
def test_joint_law(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, case, seed) < TOLERANCE


@pytest.mark.parametrize("case", EVERY_KIND)
def test_joint_law_of_every_head_kind(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, case, 1) < TOLERANCE


def test_eos_falls_inside_the_block() -> None:
    inside = [
        any(row[-1] == 0 and len(row) == 2 for (row,) in target_law(table(3, s), [PROMPT], 4))
        for s in SEEDS
    ]
    assert sum(inside) > 4


@pytest.mark.parametrize("case", ["drawn-tree", "merged-chain", "widened-tree"])
def test_joint_law_of_a_batch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, case, 2, [[1], [2, 1]], tokens=2) < TOLERANCE


# -- wrong verifiers -----------------------------------------------------------------------------


class Wrong:
    """A drafter whose drafts are damaged."""

    def __init__(self, inner: Any, damage: Callable[[Draft], Draft]) -> None:
        self.inner, self.damage = inner, damage
        self.name, self.taps, self.max_depth = "wrong", inner.taps, inner.max_depth

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, *arguments: Any) -> Draft:
        return self.damage(self.inner.propose(*arguments))


def soft_points(draft: Draft) -> Draft:
    """The argmax of each law, given as if it had been drawn."""
    if draft.q_BNV is None:
        return draft
    ids = draft.ids_BN.clone()
    ids[:, 1:] = draft.q_BNV[:, :-1].argmax(-1)
    return replace(draft, ids_BN=ids)


def drop_unlikely(draft: Draft) -> Draft:
    """Drops a drawn token of low probability, instead of keeping it and stopping there."""
    if draft.q_BNV is None:
        return draft
    chance = draft.q_BNV[:, 0].gather(1, draft.ids_BN[:, 1:2])
    valid = draft.valid_BN.clone()
    valid[:, 1:] &= chance > 0.4
    return replace(draft, valid_BN=valid)


def drop_equal(draft: Draft) -> Draft:
    """Drops a drawn child of the root that equals one of its points."""
    drawn, tokens = draft.drawn_BN[0].tolist(), draft.tokens[0]
    taken = {t for n, t in enumerate(tokens) if draft.parents[0][n] == 0 and not drawn[n]}
    bad = [n for n, t in enumerate(tokens) if drawn[n] and t in taken and not draft.parents[0][n]]
    valid = draft.valid_BN.clone()
    valid[0, bad[0] if bad else len(tokens) :] = False
    return replace(draft, valid_BN=valid)


def caught(patch: Any, make: Callable[[TableTarget, int], Any], plan: Plan) -> bool:
    for seed in SEEDS:
        target = table(3, seed)
        got = decode_law(
            patch, target, make(target, seed), [PROMPT], max_new_tokens=3, plan=plan, seed=[7]
        )
        if distance(got, target_law(target, [PROMPT], 3)) > BIASED:
            return True
    return False


def test_points_with_a_soft_law_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda t, s: Wrong(head(t, "hydra", s), soft_points)  # noqa: E731
    assert caught(monkeypatch, make, Plan(1))


def test_a_dropped_unlikely_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda t, s: Wrong(head(t, "hydra", s), drop_unlikely)  # noqa: E731
    assert caught(monkeypatch, make, Plan(1))


def test_a_drawn_child_dropped_beside_its_point_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda t, s: Wrong(  # noqa: E731
        Merged([points(t, s), head(t, "hydra", s, depth=1)]), drop_equal
    )
    assert caught(monkeypatch, make, Plan(1))


def test_siblings_without_the_update_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "without", lambda law, token: law)
    assert caught(monkeypatch, lambda t, s: head(t, "hydra", s), Plan(1, tree=((0,), (1,))))


class OneUniform(TapeNoise):
    """Accepts with the uniform that drew the token."""

    uniform: float

    def bernoulli(self, probability: float, row: int, node: int) -> bool:
        return self.uniform < probability


@pytest.mark.parametrize("reused", [False, True])
def test_the_drafts_coin_used_for_acceptance_is_caught(reused: bool) -> None:
    """By quadrature over the uniform that draws the draft; all else is enumerated."""
    cells, law = 2000, torch.zeros(3, dtype=torch.float64)
    p, q = torch.tensor([0.1, 0.6, 0.3]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    laws, laws_q = torch.stack([p, p])[None], torch.stack([q, q])[None]
    for cell in range(cells):
        u = (cell + 0.5) / cells
        token = int(torch.searchsorted(q.cumsum(0), torch.tensor(u).double()))
        draft = Draft.chain(torch.tensor([[1, token]]), laws_q)

        def first(tape: Tape, draft: Draft = draft, u: float = u) -> int:
            noise = OneUniform(tape) if reused else TapeNoise(tape)
            noise.uniform = u
            return verifier.verify(draft, laws, noise)[0].tokens[0]

        for outcome, mass in exact_law(first).items():
            law[outcome] += mass / cells
    assert ((law - p).abs().sum() / 2 > 0.01) == reused
