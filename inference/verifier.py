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
    chances = _first_chances(draft, laws)
    return [_walk(draft, b, laws[b], chances[b], noise) for b in range(len(ids))]


def _walk_greedy(ids: list[int], children: list[list[int]], choice: list[int]) -> Verdict:
    path = [0]
    while True:
        token = choice[path[-1]]
        child = next((c for c in children[path[-1]] if ids[c] == token), None)
        if child is None:
            return Verdict(path, [ids[node] for node in path[1:]] + [token])
        path.append(child)


def _first_chances(draft: Draft, laws: Sequence[Tensor]) -> list[list[float]]:
    """With what each node below the root is accepted where no sibling was rejected before it: p of
    its token or, where it is drawn, p / q.  All come in one copy from the device."""
    places = [(p[1:], ids[1:]) for p, ids in zip(draft.parents, draft.tokens, strict=True)]
    p_M = q_M = torch.cat([laws[b][place] for b, place in enumerate(places)]).double()
    if draft.q_BNV is not None:
        q_M = torch.cat([draft.q_BNV[b][place] for b, place in enumerate(places)]).double()
    p_M, q_M = torch.stack([p_M, q_M]).cpu()
    drawn_M = draft.drawn_BN[:, 1:][draft.valid_BN[:, 1:]].cpu()
    chance_M = torch.where(drawn_M, p_M / q_M, p_M)
    return [row.tolist() for row in chance_M.split([len(ids) for _, ids in places])]


def _walk(draft: Draft, row: int, p_NV: Tensor, chances: list[float], noise: Noise) -> Verdict:
    ids, children, drawn = draft.tokens[row], draft.children[row], draft.drawn_BN[row].tolist()
    q_NV = None if draft.q_BNV is None else draft.q_BNV[row]
    path = [0]
    while True:
        node, accepted = path[-1], None
        law_V = p_NV[node].double()
        proposal_V = law_V if q_NV is None else q_NV[node].double()  # read for drawn nodes alone
        for rank, child in enumerate(children[node]):
            token, chance = ids[child], chances[child - 1]
            if rank:
                chance = float(law_V[token] / proposal_V[token] if drawn[child] else law_V[token])
            # In this order NaN stays NaN, and nothing is accepted where there is no law.
            if noise.bernoulli(min(chance, 1.0), row, child):
                accepted = child
                break
            if drawn[child]:
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
