"""The only acceptance rule: from a draft and the target's laws to the accepted path and next token.

Chains are trees of one child a node, so there is one rule (Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318; for several children the recursive form of SpecInfer, arXiv
2305.09781, and EAGLE-2).  At an accepted node with children c_1..c_k, tried in order, and P := p:

    accept c_j with min(1, P(c_j) / Q_j(c_j)); on rejection P := norm((P - Q_j)+)

with Q_j the law that c_j was really drawn from: the point mass on c_j for a point proposal, q with
the rejected children removed for a token drawn without replacement.  With no child accepted, the
next token is drawn from P; after an accepted leaf, from the leaf's p, the bonus token.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads.draft import Draft
from ..heads.protocols import Noise, Purpose


class Verdict(NamedTuple):
    """What a round decided for one row.

    Attributes:
        path: accepted nodes, the root first.
        tokens: their ids without the root's, then the next token: what the round commits.
    """

    path: list[int]
    tokens: list[int]


def verify(draft: Draft, laws: Sequence[Tensor], noise: Noise) -> list[Verdict]:
    """Walks every row's tree.

    Args:
        laws: of each row, the target's laws after its nodes, [N, V] probabilities; or, when they
            are point masses (greedy), [N] token ids, compared and never divided.
        noise: decides; acceptance is keyed by the child's node, the final draw by the last
            accepted node.
    """
    ids, children = draft.tokens, draft.children
    if laws[0].ndim == 1:
        choices, ends = torch.cat(tuple(laws)).tolist(), accumulate(map(len, laws))
        return [
            _walk_greedy(row, kids, choices[end - len(law) : end])
            for row, kids, law, end in zip(ids, children, laws, ends, strict=True)
        ]
    drawn = draft.drawn_BN.tolist()
    return [
        _walk(b, ids[b], children[b], drawn[b], laws[b], None if q is None else q[b], noise)
        for q in [draft.q_BNV]
        for b in range(len(ids))
    ]


def _walk_greedy(ids: list[int], children: list[list[int]], choice: list[int]) -> Verdict:
    path = [0]
    while True:
        token = choice[path[-1]]
        child = next((c for c in children[path[-1]] if ids[c] == token), None)
        if child is None:
            return Verdict(path, [ids[node] for node in path[1:]] + [token])
        path.append(child)


def _walk(
    row: int,
    ids: list[int],
    children: list[list[int]],
    drawn: list[bool],
    p_NV: Tensor,
    q_NV: Tensor | None,
    noise: Noise,
) -> Verdict:
    path = [0]
    while True:
        node = path[-1]
        law_V, accepted = p_NV[node].double(), None
        proposal_V = None
        for child in children[node]:
            token = ids[child]
            if drawn[child]:
                if proposal_V is None:
                    assert q_NV is not None
                    proposal_V = q_NV[node].double()
                probability = float(law_V[token] / proposal_V[token])
            else:
                probability = float(law_V[token])
            # In this order NaN stays NaN, and nothing is accepted where there is no law.
            if noise.bernoulli(min(probability, 1.0), row, child):
                accepted = child
                break
            if drawn[child]:
                assert proposal_V is not None
                law_V = residual(law_V, proposal_V, token)
                proposal_V = without(proposal_V, token)
            else:
                law_V = without(law_V, token)
        if accepted is None:
            token = noise.categorical(law_V, row, node, Purpose.RESIDUAL)
            return Verdict(path, [ids[n] for n in path[1:]] + [token])
        path.append(accepted)


def residual(law_V: Tensor, proposal_V: Tensor, token: int) -> Tensor:
    """norm((p - q)+) after `token` was rejected; p without it where no mass is left."""
    rest_V = (law_V - proposal_V).clamp_(min=0)
    mass = rest_V.sum()
    return rest_V / mass if mass > 0 else without(law_V, token)


def without(law_V: Tensor, token: int) -> Tensor:
    """The law with `token` removed, renormalised; unchanged where nothing else has mass."""
    rest_V = law_V.clone()
    rest_V[token] = 0
    mass = rest_V.sum()
    return rest_V / mass if mass > 0 else law_V
