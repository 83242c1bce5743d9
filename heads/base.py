"""What a drafting head is: its contracts with the target, with training and with decoding.

Shape suffixes: B rows, T tokens, N draft nodes, L nodes of a level, K taps, W hidden width, D draft
vocabulary, V vocabulary, M loss rows.

Notation (the same in every head): the target has read x_0..x_t and holds the hidden state h_t, it
has given x_{t+1}, the root.  Draft slot k = 1, 2, .. is x_{t+1+k}; its teacher is the target's law
p_{t+k}, which `TargetSpec.logits(h_{t+k})` gives.  The shift of the labels in the loss and the
depth of the nodes in `propose` are this one fact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .config import HeadConfig as HeadConfig
from .draft import Draft, Plan
from .errors import InputError
from .losses import distil, loss_rows
from .objectives import known_normalisers, objective
from .protocols import Features, Noise, Sampling, State
from .readout import LowRank, Prior
from .shapes import Rates
from .spec import TargetSpec, TargetWeights
from .trees import grow
from .widening import Widened


@dataclass(frozen=True)
class LastFeatures:
    """State of a head that looks at one position: the features of the root's predecessor."""

    hidden_BW: Tensor
    taps_BKW: Tensor | None

    def select(self, rows: Tensor) -> Self:
        """The features of `rows` alone."""
        taps = None if self.taps_BKW is None else self.taps_BKW[rows]
        return replace(self, hidden_BW=self.hidden_BW[rows], taps_BKW=taps)


class Head(nn.Module):
    """A drafting head on a frozen target.

    A subclass gives `kind`, `Config`, `unroll` (training) and `step` (decoding); a head that
    remembers more than one position also gives `read_committed`.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[HeadConfig]]
    draft_ids: Tensor | None
    trained_length: int | None = None  # tokens of the longest row learned from, where known
    sharpness: list[float] | None = None  # by depth, see `calibration`; None before it is measured
    rates: Rates = ()  # how often drawn tokens are accepted, by depth; see `Grower`
    trees: bool = True  # False for a head that can only draft chains
    packed: bool = False  # for decoding, which frees its weights
    widen: bool = False  # draft over the ids of each row's own text too, where the head can

    def __init__(
        self, config: HeadConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        """Args:
        config: of the subclass's `Config`.
        spec: the target.
        draft_ids: [D] sorted target ids of the draft vocabulary; None for all ids.
        """
        super().__init__()
        self.config, self.spec, self.name = config, spec, self.kind
        self.taps = self.layers_tapped(config, spec.num_layers)
        self.max_depth = config.depth
        self.register_buffer("draft_ids", draft_ids)
        self._project: Callable[[Tensor], Tensor] | None = None
        self.draft_size = size = spec.vocab_size if draft_ids is None else len(draft_ids)
        rank = config.low_rank
        if rank > spec.hidden_size:
            raise InputError(
                f"head.low_rank is {rank}, and the target's hidden size {spec.hidden_size}",
                f"Give {spec.hidden_size} at most, or 0 for the target's own lm_head.",
            )
        self.low_rank = LowRank(spec.hidden_size, rank, size) if rank else None
        self.prior = Prior(spec.vocab_size, config.prior, size) if config.prior else None

    @classmethod
    def layers_tapped(cls, config: Any, layers: int) -> list[int]:
        """Target layers whose states a head of `config` reads, on a target of `layers` layers."""
        return tap_layers(config.taps, layers)

    def init_from_target(self, weights: TargetWeights) -> None:
        """Starts a new head from copies of the target's weights, where its kind can use them."""

    # -- training --------------------------------------------------------------------------------

    def unroll(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """States whose lm_head logits are the draft laws, for training.

        Args:
            rows: for each depth k, flat indices b*T+t [M_k] of the positions t to draft from.
        Returns:
            one [M_k, W] a depth.
        """
        raise TypeError(f"head kind {self.kind!r} does not define unroll")

    def output_weights(self) -> list[Tensor] | None:
        """The weights of a head's own lm_head, one [D, W] a depth; None where it has none."""
        return None

    def _readout(
        self, states: list[Tensor], rows: list[Tensor], ids: Tensor
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """States and weights as `distil` reads them; the prior of slot k at row t sees x_{t+k}."""
        weights = self.output_weights()
        if self.low_rank is not None:
            assert weights is None, "low_rank is a second lm_head"
            states = [self.low_rank.down(state) for state in states]
            weights = [self.low_rank.up.weight] * len(states)
        if self.prior is None:
            return states, weights
        before = [self.prior.before(ids[r + k]) for k, r in enumerate(rows, start=1)]
        states = [torch.cat(pair, -1) for pair in zip(states, before, strict=True)]
        after = self.prior.after.weight
        if weights is None:
            return states, [after] * len(states)
        return states, [torch.cat([weight, after], 1) for weight in weights]

    def forward(self, batch: dict[str, Tensor], features: Features) -> dict[str, Tensor]:
        """Sums over the loss rows of `batch`, to be divided by `counts`.

        Args:
            batch: `ids` [B, T], `loss_mask` [B, T] (True: the target generated this token) and,
                where rows hold several documents, `document` [B, T].
        Returns:
            loss [depth] (differentiable), top1 [depth] (argmax equals the text), prefix [depth]
            (the first k argmaxes all equal the text, the numerator of greedy tau's term k) and, in
            evaluation, accepted [depth] (the same of tau at temperature 1) and chance [S, depth]
            (see `calibration.top_chances`).
        """
        rows = loss_rows(batch, self.config.depth)
        states, ids = self.unroll(batch, features, rows), batch["ids"].flatten()
        (read, weights), config = self._readout(states, rows, ids), self.config
        sums = distil(
            objective(config.loss, config.lk_eta),
            read,
            rows,
            hidden=features["hidden"].flatten(0, 1),
            ids=ids,
            project=self.spec.projector(self.draft_ids, False),
            weights=weights,
            draft_ids=self.draft_ids,
            project_all=self.spec.projector(None, False),
            log_z=known_normalisers(features),
        )
        extra = self.extra_loss(states, rows, features)
        return sums if extra is None else sums | {"loss": sums["loss"] + extra}

    def extra_loss(
        self, states: list[Tensor], rows: list[Tensor], features: Features
    ) -> Tensor | None:
        """Sums [depth] to add to the objective's; None: nothing."""
        return None

    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        """[depth] loss rows N_k of `batch`; needs no forward."""
        return torch.stack([r.new_tensor(len(r)) for r in loss_rows(batch, self.config.depth)])

    def loss_weights(self) -> Tensor:
        """[depth] weights w_k = decay^k."""
        return self.config.decay ** torch.arange(1, self.config.depth + 1, dtype=torch.float32)

    # -- decoding --------------------------------------------------------------------------------

    @property
    def can_widen(self) -> bool:
        """Are there ids outside the draft vocabulary that the target's lm_head would serve?"""
        frozen = self.low_rank is None and self.output_weights() is None
        return frozen and self.draft_ids is not None

    def start(self, ids_BT: Tensor, length_B: Tensor, features: Features) -> State:
        """See `Drafter.start`."""
        state = self.read_committed(None, ids_BT[:, 1:], length_B, features)
        if self.widen and self.can_widen:
            return Widened.start(self, state, ids_BT, length_B + 1)
        return state

    def advance(
        self, state: Any, committed_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """See `Drafter.advance`."""
        if not isinstance(state, Widened):
            return self.read_committed(state, committed_BM, count_B, features)
        inner = self.read_committed(state.inner, committed_BM, count_B, features)
        return state.advanced(inner, committed_BM, count_B)

    def read_committed(
        self, state: Any, tokens_BM: Tensor, count_B: Tensor, features: Features
    ) -> State:
        """State after further true tokens.

        Args:
            state: before them; None at the start.
            tokens_BM: the token after each position of `features`, which may go on behind them.
            count_B: how many of the M each batch row has.
        """
        rows = torch.arange(len(count_B), device=count_B.device)
        # Taps may be there for others alone.
        taps = features["taps"][rows, count_B - 1] if self.taps else None
        return LastFeatures(features["hidden"][rows, count_B - 1], taps)

    def step(
        self, state: Any, paths_BLk: Tensor, place_BL: Tensor, memo: dict[str, Tensor]
    ) -> Tensor:
        """States [B, L, W] whose logits are the laws of slot k after L nodes of a level.

        Args:
            paths_BLk: tokens from the root (included) to each node.
            place_BL: each node's parent, as its place among the nodes of the call before.
            memo: empty at the root, kept from level to level.
        """
        raise TypeError(f"head kind {self.kind!r} does not define step")

    def draft_logits(self, hidden: Tensor, paths: Tensor) -> Tensor:
        """Logits [.., D] over the draft vocabulary of states [.., W] at slot k, behind the tokens
        `paths` [.., k] from the root on."""
        if self.prior is None:
            return self._lm_head(hidden, paths.shape[-1])
        return self._lm_head(hidden, paths.shape[-1]) + self.prior(paths[..., -1])

    def _lm_head(self, hidden: Tensor, depth: int) -> Tensor:
        if self.low_rank is not None:
            return self.low_rank(hidden)
        weights = self.output_weights()
        if weights is not None:
            return nn.functional.linear(hidden, weights[depth - 1])
        if self._project is None:
            self._project = self.spec.projector(self.draft_ids, True)
        return self._project(hidden)

    def propose(
        self, state: Any, root_B: Tensor, plan: Plan, sampling: Sampling, noise: Noise
    ) -> Draft:
        """A chain or a tree, each token chosen or drawn from the law of its own prefix."""
        if isinstance(state, Widened):
            return grow(state, state.inner, root_B, plan, sampling, noise)
        return grow(self, state, root_B, plan, sampling, noise)


def build_head(config: HeadConfig, spec: TargetSpec, draft_ids: Tensor | None, advice: str) -> Head:
    """The head that `config` describes, with new parameters.

    Args:
        advice: what the user may do about sizes that cannot be.
    Raises:
        InputError: sizes that no tensor has.
    """
    try:
        return HEADS[config.kind](config, spec, draft_ids)
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        met = f"a {config.kind} head of these sizes cannot be built: {reason}"
        raise InputError(met, advice) from None


def tap_layers(taps: list[int], layers: int) -> list[int]:
    """The taps of a config on a target of `layers` layers: shallow targets shift them down, and
    apart where they would fall together."""
    result: list[int] = []
    for tap in sorted(set(taps), reverse=True):
        tap = min(tap, result[-1] - 1 if result else layers)
        if tap >= 0:
            result.append(tap)
    return result[::-1]


HEADS: dict[str, type[Head]] = {}


def register(cls: type[Head]) -> type[Head]:
    """Adds a head kind to `HEADS`; refuses a kind that is taken or a class without its parts."""
    if not (isinstance(getattr(cls, "kind", None), str) and issubclass(cls, Head)):
        raise TypeError(f"{cls.__name__} is no head kind: subclass Head and set `kind`")
    if not issubclass(getattr(cls, "Config", type(None)), HeadConfig):
        raise TypeError(f"head kind {cls.kind!r}: set `Config` to a subclass of HeadConfig")
    if cls.kind in HEADS:
        raise ValueError(f"head kind {cls.kind!r} is taken by {HEADS[cls.kind].__name__}")
    HEADS[cls.kind] = cls
    return cls
