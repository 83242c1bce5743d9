"""How a head grows its draft: level by level, one call of the head for all nodes of a level.

Two ways: a fixed shape, whose tokens are the likeliest children of their parent or are drawn from
their parent's law without replacement; and best-first, for chosen tokens only, where the nodes of
the highest path probability are kept (the reranking of EAGLE-2, arXiv 2406.16858, section 4).  To
keep or drop a drawn token by its value would bias the output, so drawn trees have a fixed shape.

Shape suffixes: B rows, L nodes of a level, C children of a node, A nodes of all levels, N draft
nodes, k tokens of a path, W hidden width, D draft vocabulary, V draft or target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .draft import Draft, Plan, Tree
from .protocols import Noise, Paths, Purpose, Sampling
from .shapes import Rates, paying, planned_tree, tree_chances, tree_levels

CHILDREN = 8
"""Children of a node at most, where a tree is grown best-first."""


class Vocabulary(Protocol):
    """Of a `TargetSpec`, what growing needs."""

    @property
    def vocab_size(self) -> int:
        """V."""


class Grower(Protocol):
    """What drafts are grown from: a `Head`, or anything else with these of its parts."""

    @property
    def max_depth(self) -> int:
        """See `Drafter`."""

    @property
    def trees(self) -> bool:
        """See `Head`."""

    @property
    def draft_ids(self) -> Tensor | None:
        """[D] or [B, D] target ids of the columns of the logits; None for all."""

    @property
    def sharpness(self) -> list[float] | None:
        """See `calibration.sharpness`."""

    @property
    def rates(self) -> Rates:
        """How often the first drawn child of a node is accepted, by its depth; () where nobody has
        measured it.  Of held-out rows at temperature 1, so the same whatever is drawn."""

    @property
    def spec(self) -> Vocabulary:
        """The target."""

    def step(
        self, state: Any, paths_BLk: Tensor, place_BL: Tensor, memo: dict[str, Tensor]
    ) -> Tensor:
        """See `Head.step`."""

    def draft_logits(self, hidden: Tensor, paths: Tensor) -> Tensor:
        """See `Head.draft_logits`."""


def grow(
    head: Grower, state: Any, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
) -> Draft:
    """The draft that `plan` asks `head` for: chosen tokens under greedy decoding, else drawn."""
    depth = min(plan.depth, head.max_depth)
    if depth == 0 or plan.nodes == 0:
        return Draft.root(root_B)
    growth = _Growth(head, state, root_B, plan, sampling)
    if sampling.greedy and plan.tree is None:
        branching = head.trees and plan.nodes is not None
        return growth.best_first(depth, plan.nodes or depth, CHILDREN if branching else 1)
    rates = () if sampling.greedy else head.rates  # these are of drawn tokens
    tree = planned_tree(plan, depth, head.trees, rates)
    return growth.fixed(tree, rates, noise) if tree else Draft.root(root_B)


# -- growth --------------------------------------------------------------------------------------


class _Growth:
    """A draft on its way; node 0 is the root.

    Attributes:
        ids, parent, score: of each level, [B, L]: tokens, parents as node indices, and the log
            probability of the path, -inf where a row has no such node.
        width: nodes of the last level, from the first, that are looked at for children.
        place_BL: place of the last level's parents among the nodes of the level above.
        paths_BLk: tokens from the root to each node of the last level.
        memo: what the head keeps between levels.
    """

    def __init__(
        self, head: Grower, state: Any, root_B: Tensor, plan: Plan, sampling: Sampling
    ) -> None:
        self.head, self.state, self.plan, self.sampling = head, state, plan, sampling
        self.floor = math.log(plan.confidence) if plan.confidence > 0 else -math.inf
        root_B1 = root_B[:, None]
        self.ids, self.parent = [root_B1], [torch.full_like(root_B1, -1)]
        self.score = [torch.zeros(root_B1.shape, device=root_B.device)]
        self.place_BL, self.paths_BLk = torch.zeros_like(root_B1), root_B1[..., None]
        self.width, self.count, self.start = 1, 1, 0
        self.memo: dict[str, Tensor] = {}

    def best_first(self, depth: int, nodes: int, children: int) -> Draft:
        """The `nodes` nodes of the highest path probability; a chain where `children` is 1."""
        for _ in range(depth):
            if not self.width:
                break
            scores_BLV, ids = self._expand()
            children = min(children, nodes, scores_BLV.shape[-1])
            token_BLC, path_BLC = self._likeliest(scores_BLV, children)
            path_BC = path_BLC.flatten(1)
            # A node outside the best `nodes` of its level has no descendant inside the best of all.
            score_BL, best_BL = path_BC.topk(min(nodes, path_BC.shape[1]), -1)
            token_BL = token_BLC.flatten(1).gather(1, best_BL)
            self._add(token_BL, ids, best_BL // children, score_BL)
            self.width = self._hopeful(score_BL, nodes)
        return self._best(nodes)

    def _hopeful(self, score_BL: Tensor, nodes: int) -> int:
        """How many nodes of the last level, from the first, may have children among the best."""
        if score_BL.device.type != "cpu":  # where looking would wait for the device
            return score_BL.shape[1]
        least = max(self.plan.confidence, self.plan.worth)
        hopeful_BL = score_BL.exp() >= least if least else score_BL > -torch.inf
        all_BA = torch.cat(self.score, 1)[:, 1:]
        if all_BA.shape[1] > nodes:
            hopeful_BL &= score_BL > all_BA.topk(nodes, -1).values[:, -1:]
        return int(hopeful_BL.sum(1).max())

    def fixed(self, tree: Tree, rates: Rates, noise: Noise) -> Draft:
        """The nodes of `tree`: the likeliest tokens, or drawn ones."""
        laws: list[Tensor] = []
        for nodes in tree_levels(tree):
            scores_BLV, ids = self._expand()
            place_L = torch.tensor([place for place, _ in nodes], device=scores_BLV.device)
            if self.sampling.greedy:
                most = max(rank for _, rank in nodes) + 1
                token_BLC, path_BLC = self._likeliest(scores_BLV, most)
                flat_L = place_L * most + place_L.new_tensor([rank for _, rank in nodes])
                token_BL, score_BL = token_BLC.flatten(1)[:, flat_L], path_BLC.flatten(1)[:, flat_L]
            else:
                laws.append(scores_BLV.softmax(-1).nan_to_num(nan=0.0))
                token_BL, chance_BL = _draw(laws[-1], nodes, noise, self.count)
                score_BL = self._above()[:, place_L] + chance_BL.log()
            self._add(token_BL, ids, place_L.expand(len(token_BL), -1), score_BL)
            self.width = len(nodes)
        there_BA = torch.cat(self.score, 1).cpu() > -torch.inf
        # By the shape alone: what a drawn node is worth may not depend on what was drawn.
        chance_A = torch.tensor(tree_chances(tree, rates), dtype=torch.float64)
        return self._draft(there_BA, chance_A.expand_as(there_BA), laws)

    def _expand(self) -> tuple[Tensor, Tensor | None]:
        """Scores [B, L, V] of the tokens after the last level's nodes, of which no law can be made
        where the head gave NaN or inf; and the target ids that the columns stand for, all when
        None."""
        head, sampling = self.head, self.sampling
        paths_BLk = self.paths_BLk[:, : self.width]
        hidden_BLW = head.step(self.state, paths_BLk, self.place_BL[:, : self.width], self.memo)
        logits_BLD = head.draft_logits(hidden_BLW, paths_BLk)
        if sampling.raw_greedy:
            return logits_BLD, head.draft_ids
        lawless_BL1 = ~logits_BLD.amax(-1, keepdim=True).isfinite()  # so is that of NaN and inf
        logits_BLD = logits_BLD.masked_fill(lawless_BL1, 0.0)
        logits_BLV = scatter_logits(logits_BLD, head.draft_ids, head.spec.vocab_size)
        scores_BLV = sampling.scores(logits_BLV.flatten(0, 1), self._paths()).view_as(logits_BLV)
        return scores_BLV.masked_fill(lawless_BL1, -torch.inf), None

    def _paths(self) -> Paths:
        """Of the nodes that are looked at for children; fetched when first asked for."""

        @cache
        def fetched() -> tuple[list[list[int]], list[bool]]:
            so_far_BLk = self.paths_BLk[:, : self.width, 1:]
            there_BL = self.score[-1][:, : self.width] > -torch.inf
            return so_far_BLk.flatten(0, 1).tolist(), there_BL.flatten().tolist()

        def path(node: int) -> tuple[int, list[int]] | None:
            so_far, there = fetched()
            return (node // self.width, so_far[node]) if there[node] else None

        return path

    def _above(self) -> Tensor:
        """[B, L] path scores of the nodes that get children: none below the floor does."""
        score_BL = self.score[-1][:, : self.width]
        return score_BL.masked_fill(score_BL < self.floor, -torch.inf)

    def _likeliest(self, scores_BLV: Tensor, children: int) -> tuple[Tensor, Tensor]:
        """[B, L, C] the likeliest columns after each node, and the path scores."""
        scores_BLV = scores_BLV.to(torch.promote_types(torch.float32, scores_BLV.dtype))
        if self.head.sharpness is not None:  # what is promised decides which nodes are kept
            scores_BLV = scores_BLV * self.head.sharpness[len(self.ids) - 1]
        law_BLV = scores_BLV.log_softmax(-1)  # all NaN where there is none
        best_BLC, index_BLC = law_BLV.topk(min(children, scores_BLV.shape[-1]), -1)
        path_BLC = self._above()[..., None] + best_BLC.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        missing = children - path_BLC.shape[-1]
        if missing:
            index_BLC = torch.nn.functional.pad(index_BLC, (0, missing))
            path_BLC = torch.nn.functional.pad(path_BLC, (0, missing), value=-torch.inf)
        return index_BLC, path_BLC

    def _add(self, token_BL: Tensor, ids: Tensor | None, place_BL: Tensor, score: Tensor) -> None:
        above_BLk = self.paths_BLk.gather(
            1, place_BL[..., None].expand(-1, -1, self.paths_BLk.shape[-1])
        )
        if ids is not None:
            token_BL = ids[token_BL] if ids.ndim == 1 else ids.gather(1, token_BL)
        self.ids.append(token_BL)
        self.parent.append(place_BL + self.start)
        self.score.append(score.to(self.score[0].dtype))
        self.place_BL = place_BL
        self.paths_BLk = torch.cat([above_BLk, token_BL[..., None]], -1)
        self.start, self.count = self.count, self.count + token_BL.shape[1]

    def _best(self, nodes: int) -> Draft:
        """The `nodes` nodes of the highest path probability, as far as they pay."""
        score_BA = torch.cat(self.score, 1).cpu()
        # Stable, so that of a parent and a child of equal probability the parent is taken.
        best_BA, node_BA = score_BA.sort(dim=1, descending=True, stable=True)
        chances = best_BA[:, 1 : nodes + 1].exp().tolist()
        most_B1 = torch.tensor([[paying(row, self.plan)] for row in chances])
        kept_BA = (node_BA.argsort(1) <= most_B1) & (score_BA > -torch.inf)
        return self._draft(kept_BA, score_BA.exp())

    def _draft(self, kept_BA: Tensor, chance_BA: Tensor, laws: Sequence[Tensor] = ()) -> Draft:
        """The nodes that are kept, of which the root is one and with a node its parent.

        Args:
            kept_BA, chance_BA: on the CPU; the latter for `Draft.chances`.
        """
        ids_BA, parent_BA = torch.cat(self.ids, 1), torch.cat(self.parent, 1).cpu()
        counts = kept_BA.sum(1).tolist()
        # In their order; what fills a row up is any other node.
        node_BN = (~kept_BA).int().argsort(dim=1, stable=True)[:, : max(counts)]
        # A kept node's new index is its place among the kept.
        above_BN = parent_BA.gather(1, node_BN).clamp(min=0)
        parent_BN = kept_BA.cumsum(1).gather(1, above_BN) - 1
        parent_BN[:, 0] = -1
        valid_BN = kept_BA.gather(1, node_BN)
        drawn_BN = torch.full_like(valid_BN, bool(laws))
        drawn_BN[:, 0] = False
        chances = chance_BA.gather(1, node_BN).tolist()
        chances = [row[:n] for row, n in zip(chances, counts, strict=True)]
        node_BN = node_BN.to(ids_BA.device)
        draft = Draft(ids_BA.gather(1, node_BN), parent_BN, drawn_BN, valid_BN, chances=chances)
        if laws:
            leaves = laws[0].new_zeros(len(ids_BA), self.ids[-1].shape[1], laws[0].shape[-1])
            rows_B1 = torch.arange(len(ids_BA), device=ids_BA.device)[:, None]
            draft.q_BNV = torch.cat([*laws, leaves], 1)[rows_B1, node_BN]
        return draft


def _draw(
    law_BLV: Tensor, nodes: list[tuple[int, int]], noise: Noise, start: int
) -> tuple[Tensor, Tensor]:
    """[B, L] the tokens of a level's nodes, drawn from their parents' laws without replacement,
    and their probabilities: 0 where a law has nothing left."""
    tokens = [[0] * len(nodes) for _ in law_BLV]
    chance_BL = law_BLV.new_zeros(len(law_BLV), len(nodes))
    for row, laws in enumerate(law_BLV):
        left: dict[int, Tensor] = {}
        for n, (place, _) in enumerate(nodes):
            law_V = left.get(place, laws[place])
            if law_V.any():
                token = noise.categorical(law_V, row, start + n, Purpose.DRAFT)
                tokens[row][n], chance_BL[row, n] = token, laws[place, token]
                left[place] = law_V.index_fill(0, law_V.new_tensor([token]).long(), 0.0)
    return torch.tensor(tokens, device=law_BLV.device), chance_BL


def scatter_logits(logits: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Draft logits [.., D] over target ids [.., V], -inf outside the draft vocabulary, which may be
    one [B, D] a row of logits [B, L, D]; there an id may stand twice, at -inf the second time."""
    if draft_ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    if draft_ids.ndim == 1:
        return full.index_copy_(-1, draft_ids, logits)
    return full.scatter_reduce_(-1, draft_ids[:, None].expand_as(logits), logits, "amax")
