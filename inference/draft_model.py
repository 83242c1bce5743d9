"""A separate, smaller language model as the drafter: the classic baseline (arXiv 2211.17192).

Shape suffixes: B rows, T tokens, W nodes of a level, M committed tokens, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads.draft import Draft, Plan, padded
from ..heads.errors import InputError
from ..heads.protocols import Features, Noise, Sampling, State
from ..heads.shapes import Rates
from ..heads.trees import grow
from .cache import SlotCache
from .target import TargetModel


@dataclass
class DraftModelState:
    """Attributes:
    cache: the draft model's own, holding what it has read.
    unread: committed tokens that it has not read, the root last.
    guessed: tokens read beyond the committed ones in the last round.
    """

    cache: SlotCache
    unread: list[list[int]]
    guessed: list[list[int]]

    def select(self, rows: Tensor) -> DraftModelState:
        """The state of `rows` alone."""
        kept = rows.tolist()
        self.cache.select(kept)
        return DraftModelState(
            self.cache, [self.unread[row] for row in kept], [self.guessed[row] for row in kept]
        )


class DraftModel:
    """Drafts chains with another model of the same vocabulary.

    Args:
        model: the draft model.
        target: the target; checked to give the same ids the same meaning.
        max_depth: tokens drafted a round.
    Raises:
        InputError: other vocabularies, by the first id that differs.
    """

    taps: list[int] = []  # noqa: RUF012
    trees: bool = False
    draft_ids: Tensor | None = None
    sharpness: list[float] | None = None
    rates: Rates = ()

    def __init__(self, model: TargetModel, target: TargetModel, max_depth: int = 4) -> None:
        check_same_vocabulary(model, target)
        self.model, self.spec, self.max_depth = model, target, max_depth
        self.name = "draft_model"

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `heads.protocols.Drafter`."""
        lengths = length_B.tolist()
        cache = self.model.new_cache(len(lengths), ids_BT.shape[1] + 64)
        known_BT = ids_BT[:, :-1].clamp(max=self.model.vocab_size - 1)
        self.model.prefill(known_BT.to(self.model.device), lengths, cache, [])
        roots = ids_BT[torch.arange(len(lengths)), length_B].tolist()
        return DraftModelState(cache, [[root] for root in roots], [[] for _ in roots])

    def propose(
        self,
        state: DraftModelState,
        root_B: Tensor,
        plan: Plan,
        sampling: Sampling,
        noise: Noise,
    ) -> Draft:
        """A chain, for each row for which the model has positions left."""
        depth = min(plan.depth, self.max_depth)
        known = [n + len(ids) for n, ids in zip(state.cache.lengths, state.unread, strict=True)]
        # Of the tokens drafted the last is not read.
        room = [depth if n + depth - 1 <= self.model.max_positions else 0 for n in known]
        if not any(room):
            return Draft.root(root_B)
        return grow(self, state, root_B, plan, sampling, noise).shortened(room)

    def step(
        self,
        state: DraftModelState,
        paths_BWk: Tensor,
        place_BW: Tensor,
        memo: dict[str, Tensor],
    ) -> Tensor:
        """See `Head.step`: reads what is new, and gives the state after the last token."""
        if paths_BWk.shape[-1] == 1:
            rows, state.unread = state.unread, [[] for _ in state.unread]
        else:
            rows = paths_BWk[:, 0, -1:].tolist()
            for guessed, row in zip(state.guessed, rows, strict=True):
                guessed += row
        counts = [len(row) for row in rows]
        ids_BN, width = padded(rows, 0), max(counts)
        ids_BN.clamp_(max=self.model.vocab_size - 1)  # padding ids of a larger target
        chain = torch.ones(1, width, width, dtype=torch.bool).tril()
        valid_BN = torch.arange(width) < torch.tensor(counts)[:, None]
        features = self.model.forward(
            ids_BN.to(self.model.device), state.cache, chain, None, [], valid_BN
        )
        state.cache.keep([list(range(count)) for count in counts])
        last_B = torch.tensor(counts, device=self.model.device) - 1
        return features["hidden"][torch.arange(len(rows)), last_B][:, None]

    def draft_logits(self, hidden: Tensor, paths: Tensor) -> Tensor:
        """Logits over the target's ids; ids that only the target has are never proposed."""
        logits, size = self.model.logits(hidden), self.spec.vocab_size
        extra = size - logits.shape[-1]
        logits = torch.nn.functional.pad(logits, (0, max(0, extra)), value=-torch.inf)
        return logits[..., :size].to(self.spec.device)

    def advance(
        self, state: DraftModelState, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `heads.protocols.Drafter`: guesses that were not committed are forgotten."""
        unread = []
        for row, (ids, n) in enumerate(zip(committed_BM.tolist(), count_B.tolist(), strict=True)):
            guessed, right = state.guessed[row], 0
            while right < min(len(guessed), n - 1) and guessed[right] == ids[right]:
                right += 1
            state.cache.lengths[row] -= len(guessed) - right
            unread.append(state.unread[row] + ids[right:n])
        return DraftModelState(state.cache, unread, [[] for _ in unread])


def check_same_vocabulary(model: TargetModel, target: TargetModel) -> None:
    """Equal sizes do not make equal vocabularies: each id's text is compared.

    Raises:
        InputError: the first id that differs, with both texts.
    """
    ours, theirs = target.tokenizer, model.tokenizer
    if ours is None or theirs is None:
        sizes = target.vocab_size, model.vocab_size
        if sizes[0] != sizes[1]:
            raise InputError(
                f"the target has {sizes[0]} ids, the draft model {sizes[1]}",
                "Without tokenizers to compare, a draft model must have the target's size.",
            )
        return
    count = min(len(ours), len(theirs), target.vocab_size, model.vocab_size)
    pairs = zip(
        ours.convert_ids_to_tokens(list(range(count))),
        theirs.convert_ids_to_tokens(list(range(count))),
        strict=True,
    )
    for token, (mine, other) in enumerate(pairs):
        if mine != other:
            raise InputError(
                f"id {token} is {mine!r} for the target and {other!r} for the draft model",
                "A draft model must share the target's tokenizer; trained heads always do.",
            )
