"""How a head grows its draft: level by level, one call of the head for all nodes of a level.

Two ways: a fixed shape, whose tokens are the likeliest children of their parent or are drawn from
their parent's law without replacement; and best-first, for chosen tokens only, where the nodes of
the highest path probability are kept (the reranking of EAGLE-2, arXiv 2406.16858, section 4).  To
keep or drop a drawn token by its value would bias the output, so drawn trees have a fixed shape.

Shape suffixes: B rows, W nodes of a level, C children of a node, L nodes of all levels, N draft
nodes, k tokens of a path, V draft or target vocabulary.
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
from .shapes import paying, planned_tree, tree_levels, tree_worth

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
        """[V] or [B, V] target ids of the columns of the logits; None for all."""

    @property
    def sharpness(self) -> list[float] | None:
        """See `calibration.sharpness`."""

    @property
    def spec(self) -> Vocabulary:
        """The target."""

    def step(
        self, state: Any, paths_BWk: Tensor, place_BW: Tensor, memo: dict[str, Tensor]
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
    tree = planned_tree(plan, depth, head.trees)
    return growth.fixed(tree, noise) if tree else Draft.root(root_B)


# -- growth --------------------------------------------------------------------------------------


class _Growth:
    """A draft on its way; node 0 is the root.

    Attributes:
        ids, parent, score: of each level, [B, W]: tokens, parents as node indices, and the log
            probability of the path, -inf where a row has no such node.
        width: nodes of the last level, from the first, that are looked at for children.
        place_BW: place of the last level's parents among the nodes of the level above.
        paths_BWk: tokens from the root to each node of the last level.
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
        self.place_BW, self.paths_BWk = torch.zeros_like(root_B1), root_B1[..., None]
        self.width, self.count, self.start = 1, 1, 0
        self.memo: dict[str, Tensor] = {}

    def best_first(self, depth: int, nodes: int, children: int) -> Draft:
        """The `nodes` nodes of the highest path probability; a chain where `children` is 1."""
        for _ in range(depth):
            if not self.width:
                break
            scores_BWV, ids = self._expand()
            children = min(children, nodes, scores_BWV.shape[-1])
            token_BWC, path_BWC = self._likeliest(scores_BWV, children)
            path_BC = path_BWC.flatten(1)
            # A node outside the best `nodes` of its level has no descendant inside the best of all.
            score_BW, best_BW = path_BC.topk(min(nodes, path_BC.shape[1]), -1)
            token_BW = token_BWC.flatten(1).gather(1, best_BW)
            self._add(token_BW, ids, best_BW // children, score_BW)
            self.width = self._hopeful(score_BW, nodes)
        return self._draft(nodes, torch.cat(self.score, 1))

    def _hopeful(self, score_BW: Tensor, nodes: int) -> int:
        """How many nodes of the last level, from the first, may have children among the best."""
        if score_BW.device.type != "cpu":  # where looking would wait for the device
            return score_BW.shape[1]
        least = max(self.plan.confidence, self.plan.worth)
        hopeful_BW = score_BW.exp() >= least if least else score_BW > -torch.inf
        all_BL = torch.cat(self.score, 1)[:, 1:]
        if all_BL.shape[1] > nodes:
            hopeful_BW &= score_BW > all_BL.topk(nodes, -1).values[:, -1:]
        return int(hopeful_BW.sum(1).max())

    def fixed(self, tree: Tree, noise: Noise) -> Draft:
        """The nodes of `tree`: the likeliest tokens, or drawn ones."""
        laws: list[Tensor] = []
        for nodes in tree_levels(tree):
            scores_BWV, ids = self._expand()
            place_W = torch.tensor([place for place, _ in nodes], device=scores_BWV.device)
            if self.sampling.greedy:
                most = max(rank for _, rank in nodes) + 1
                token_BWC, path_BWC = self._likeliest(scores_BWV, most)
                flat_W = place_W * most + place_W.new_tensor([rank for _, rank in nodes])
                token_BW, score_BW = token_BWC.flatten(1)[:, flat_W], path_BWC.flatten(1)[:, flat_W]
            else:
                laws.append(scores_BWV.softmax(-1).nan_to_num(nan=0.0))
                token_BW, chance_BW = _draw(laws[-1], nodes, noise, self.count)
                score_BW = self._above()[:, place_W] + chance_BW.log()
            self._add(token_BW, ids, place_W.expand(len(token_BW), -1), score_BW)
            self.width = len(nodes)
        # What a drawn tree gives up first may not depend on what was drawn.
        score_BL = torch.cat(self.score, 1)
        worth_BL = score_BL.new_tensor(tree_worth(tree)).expand_as(score_BL)
        return self._draft(
            len(tree), worth_BL.masked_fill(score_BL == -torch.inf, -torch.inf), laws
        )

    def _expand(self) -> tuple[Tensor, Tensor | None]:
        """Scores [B, W, V] of the tokens after the last level's nodes, of which no law can be made
        where the head gave NaN or inf; and the target ids that the V columns stand for, all when
        None."""
        head, sampling = self.head, self.sampling
        paths_BWk = self.paths_BWk[:, : self.width]
        hidden_BWD = head.step(self.state, paths_BWk, self.place_BW[:, : self.width], self.memo)
        logits_BWV = head.draft_logits(hidden_BWD, paths_BWk)
        if sampling.raw_greedy:
            return logits_BWV, head.draft_ids
        lawless_BW1 = ~logits_BWV.amax(-1, keepdim=True).isfinite()  # so is that of NaN and inf
        logits_BWV = logits_BWV.masked_fill(lawless_BW1, 0.0)
        logits_BWV = scatter_logits(logits_BWV, head.draft_ids, head.spec.vocab_size)
        scores_BWV = sampling.scores(logits_BWV.flatten(0, 1), self._paths()).view_as(logits_BWV)
        return scores_BWV.masked_fill(lawless_BW1, -torch.inf), None

    def _paths(self) -> Paths:
        """Of the nodes that are looked at for children; fetched when first asked for."""

        @cache
        def fetched() -> tuple[list[list[int]], list[bool]]:
            so_far_BWk = self.paths_BWk[:, : self.width, 1:]
            there_BW = self.score[-1][:, : self.width] > -torch.inf
            return so_far_BWk.flatten(0, 1).tolist(), there_BW.flatten().tolist()

        def path(node: int) -> tuple[int, list[int]] | None:
            so_far, there = fetched()
            return (node // self.width, so_far[node]) if there[node] else None

        return path

    def _above(self) -> Tensor:
        """[B, W] path scores of the nodes that get children: none below the floor does."""
        score_BW = self.score[-1][:, : self.width]
        return score_BW.masked_fill(score_BW < self.floor, -torch.inf)

    def _likeliest(self, scores_BWV: Tensor, children: int) -> tuple[Tensor, Tensor]:
        """[B, W, C] the likeliest columns after each node, and the path scores."""
        scores_BWV = scores_BWV.to(torch.promote_types(torch.float32, scores_BWV.dtype))
        if self.head.sharpness is not None:  # what is promised decides which nodes are kept
            scores_BWV = scores_BWV * self.head.sharpness[len(self.ids) - 1]
        law_BWV = scores_BWV.log_softmax(-1)  # all NaN where there is none
        best_BWC, index_BWC = law_BWV.topk(min(children, scores_BWV.shape[-1]), -1)
        path_BWC = self._above()[..., None] + best_BWC.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        missing = children - path_BWC.shape[-1]
        if missing:
            index_BWC = torch.nn.functional.pad(index_BWC, (0, missing))
            path_BWC = torch.nn.functional.pad(path_BWC, (0, missing), value=-torch.inf)
        return index_BWC, path_BWC

    def _add(self, token_BW: Tensor, ids: Tensor | None, place_BW: Tensor, score: Tensor) -> None:
        above_BWk = self.paths_BWk.gather(
            1, place_BW[..., None].expand(-1, -1, self.paths_BWk.shape[-1])
        )
        if ids is not None:
            token_BW = ids[token_BW] if ids.ndim == 1 else ids.gather(1, token_BW)
        self.ids.append(token_BW)
        self.parent.append(place_BW + self.start)
        self.score.append(score.to(self.score[0].dtype))
        self.place_BW = place_BW
        self.paths_BWk = torch.cat([above_BWk, token_BW[..., None]], -1)
        self.start, self.count = self.count, self.count + token_BW.shape[1]

    def _draft(self, nodes: int, worth_BL: Tensor, laws: Sequence[Tensor] = ()) -> Draft:
        """The root and the `nodes` worthiest of the nodes that are there (worth above -inf)."""
        ids_BL, parent_BL = torch.cat(self.ids, 1), torch.cat(self.parent, 1).cpu()
        # Stable, so that of a parent and a child of equal worth the parent is taken.
        worth_BL = worth_BL.cpu()
        best_BL, node_BL = worth_BL.sort(dim=1, descending=True, stable=True)
        best_BN, node_BN = best_BL[:, : nodes + 1], node_BL[:, : nodes + 1]
        chances = best_BN.exp().tolist()
        pays_B1 = torch.tensor([[paying(row[1:], self.plan)] for row in chances])
        best_BN = best_BN.masked_fill(torch.arange(best_BN.shape[1]) > pays_B1, -torch.inf)
        kept_BN = node_BN.masked_fill(best_BN == -torch.inf, self.count).sort(1).values
        valid_BN = kept_BN < self.count
        width = int(valid_BN.sum(1).max())
        kept_BN, valid_BN = kept_BN[:, :width].clamp(max=self.count - 1), valid_BN[:, :width]
        # A kept node's new index is its place among the kept.
        above_BN = parent_BL.gather(1, kept_BN)
        parent_BN = torch.searchsorted(kept_BN.contiguous(), above_BN)
        parent_BN[:, 0] = -1
        drawn_BN = torch.full_like(valid_BN, bool(laws))
        drawn_BN[:, 0] = False
        counts = valid_BN.sum(1).tolist()
        worth = worth_BL.gather(1, kept_BN).exp().tolist()
        likely = [row[:n] for row, n in zip(worth, counts, strict=True)]
        kept_BN = kept_BN.to(ids_BL.device)
        draft = Draft(ids_BL.gather(1, kept_BN), parent_BN, drawn_BN, valid_BN, chances=likely)
        if laws:
            leaves = laws[0].new_zeros(len(ids_BL), self.ids[-1].shape[1], laws[0].shape[-1])
            rows_B1 = torch.arange(len(ids_BL), device=ids_BL.device)[:, None]
            draft.q_BNV = torch.cat([*laws, leaves], 1)[rows_B1, kept_BN]
        return draft


def _draw(
    law_BWV: Tensor, nodes: list[tuple[int, int]], noise: Noise, start: int
) -> tuple[Tensor, Tensor]:
    """[B, W] the tokens of a level's nodes, drawn from their parents' laws without replacement,
    and their probabilities: 0 where a law has nothing left."""
    tokens = [[0] * len(nodes) for _ in law_BWV]
    chance_BW = law_BWV.new_zeros(len(law_BWV), len(nodes))
    for row, laws in enumerate(law_BWV):
        left: dict[int, Tensor] = {}
        for n, (place, _) in enumerate(nodes):
            law_V = left.get(place, laws[place])
            if law_V.any():
                token = noise.categorical(law_V, row, start + n, Purpose.DRAFT)
                tokens[row][n], chance_BW[row, n] = token, laws[place, token]
                left[place] = law_V.index_fill(0, law_V.new_tensor([token]).long(), 0.0)
    return torch.tensor(tokens, device=law_BWV.device), chance_BW


def scatter_logits(logits: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Draft logits [.., D] over target ids [.., V], -inf outside the draft vocabulary, which may be
    one [B, D] a row of logits [B, W, D]; there an id may stand twice, at -inf the second time."""
    if draft_ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    if draft_ids.ndim == 1:
        return full.index_copy_(-1, draft_ids, logits)
    return full.scatter_reduce_(-1, draft_ids[:, None].expand_as(logits), logits, "amax")
