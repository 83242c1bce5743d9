"""What MTP and EAGLE share: a recurrence over draft slots that attends to the row's past.

Step k at row t reads e(x_{t+k}) and the state of step k-1, and gives the state whose logits are the
law of slot k.  Its keys are those of step 1 at rows s <= t, which come from the target's own states
and true tokens, and its own of steps 2..k; training and drafting see exactly the same.

Shape suffixes: B rows, T tokens, M committed tokens, R loss rows of a batch row, L nodes of one
call, N draft nodes of the round so far, K taps, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from .base import Head, tap_layers
from .config import HeadConfig
from .kv import KVBuffer
from .layers import DecoderLayer, RMSNorm, TapNorm
from .past import LossRows, read_last, read_rows, start_layer
from .protocols import Features
from .spec import TargetSpec, TargetWeights


class SequenceConfig(HeadConfig):
    """Attributes:
    norm_stage: the target's state at row t, before or after its final norm.
    recycle: what a step hands to the next one, its raw output or that behind the head's norm.
    tap_norm: RMS-norm each tapped state before they are joined.
    width: inner width of the layer's MLP; None for the target's.
    """

    norm_stage: Literal["pre", "post"] = "pre"
    recycle: Literal["raw", "normed"] = "raw"
    tap_norm: bool = True
    width: int | None = Field(None, ge=1)


class Cell(nn.Module):
    """One step of the recurrence.  A subclass says in `read` how embedding and state enter."""

    def __init__(self, spec: TargetSpec, config: SequenceConfig, inputs: int | None = None) -> None:
        super().__init__()
        self.embed_norm, self.hidden_norm = RMSNorm(spec.hidden_size), RMSNorm(spec.hidden_size)
        self.layer = DecoderLayer(spec.config, inputs, config.width)
        self.norm = RMSNorm(spec.hidden_size)
        self.recycle_normed = config.recycle == "normed"

    def read(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and what attention reads, from embeddings and recycled states [.., W]."""
        raise TypeError(f"{type(self).__name__} does not define read")

    def recycled(self, out: Tensor) -> Tensor:
        """What the next step gets of the raw output."""
        return self.norm(out) if self.recycle_normed else out

    def init_from_target(self, weights: TargetWeights, norm_stage: str) -> None:
        """Starts the layer as the target's last one where shapes fit, its output projections at
        zero, and the norm so that the first state is the target's own."""
        if weights.norm_scale is not None:
            scale = weights.norm_scale
            # A state behind the target's norm has its scale already; its size is that of the scale.
            same = scale if norm_stage == "pre" else scale.pow(2).mean().sqrt().expand_as(scale)
            self.norm.weight.data.copy_(same)
        start_layer(self.layer, weights)


@dataclass(frozen=True)
class Memory:
    """State of a sequence head: its caches, and each cell's raw output at the root's row.

    Attributes:
        length_B: rows that the target has read; the root's row is the last of them.
    """

    caches: list[KVBuffer]
    outs: list[Tensor]
    length_B: Tensor

    def select(self, rows: Tensor) -> Memory:
        """The memory of `rows` alone."""
        caches, outs = [c.select(rows) for c in self.caches], [out[rows] for out in self.outs]
        return Memory(caches, outs, self.length_B[rows])


class SequenceHead(Head):
    """One cell applied at every step.  A subclass gives `kind`, `Config` and `make_cell`.

    Attributes:
        first_position: rotary position of step 1 at row 0.
        cells: an nn.ModuleList of `Cell`.
    """

    first_position: ClassVar[int]
    config: SequenceConfig
    cells: Any

    def __init__(
        self, config: SequenceConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        self.cells = nn.ModuleList(self.make_cell() for _ in range(self.cell_count()))
        joined = tap_layers(config.taps, spec.num_layers)
        self.joined = [self.taps.index(tap) for tap in joined]
        if joined:
            width = len(joined) * spec.hidden_size
            self.tap_norm = TapNorm(len(joined), spec.hidden_size) if config.tap_norm else None
            self.tap_in = nn.Linear(width, spec.hidden_size, bias=False)
            if self.reads_hidden(config):
                nn.init.zeros_(self.tap_in.weight)

    def make_cell(self) -> Cell:
        """A new cell."""
        raise TypeError(f"head kind {self.kind!r} does not define make_cell")

    def cell_count(self) -> int:
        """Cells with weights of their own."""
        return 1

    @classmethod
    def reads_hidden(cls, config: Any) -> bool:
        """Whether the first state holds the target's last one beside the joined taps."""
        return True

    @classmethod
    def layers_tapped(cls, config: Any, layers: int) -> list[int]:
        """See `Head.layers_tapped`; a state before the final norm is the highest tap."""
        last = [layers] if config.norm_stage == "pre" and cls.reads_hidden(config) else []
        return sorted({*tap_layers(config.taps, layers), *last})

    def init_from_target(self, weights: TargetWeights) -> None:
        """See `Head.init_from_target`."""
        for cell in self.cells:
            cell.init_from_target(weights, self.config.norm_stage)

    def first_state(self, features: Features) -> Tensor:
        """State of step 0 [.., W]: the target's last one, corrected by the joined taps."""
        pre = self.config.norm_stage == "pre"
        if not self.joined:
            return features["taps"][..., -1, :] if pre else features["hidden"]
        taps = features["taps"][..., self.joined, :]
        joined = self.tap_in(taps.flatten(-2) if self.tap_norm is None else self.tap_norm(taps))
        if not self.reads_hidden(self.config):
            return joined
        return joined + (features["taps"][..., -1, :] if pre else features["hidden"])

    # -- training --------------------------------------------------------------------------------

    def unroll(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """See `Head.unroll`: step k runs at the rows of depth 1 alone, which hold all others."""
        ids_BT, cell, first = batch["ids"], self.cells[0], self.first_position
        at, last = LossRows(rows[0], ids_BT.shape), ids_BT.shape[1] - 1
        residual, inputs = cell.read(
            self.spec.embed(ids_BT.roll(-1, 1)), self.first_state(features)
        )
        out, keys, values, mask = read_rows(
            cell.layer, residual, inputs, batch.get("document"), at, first
        )
        outs, own = [out], at.place_BR.shape[1]
        diagonal = torch.eye(own, dtype=torch.bool, device=mask.device).expand(len(mask), -1, -1)
        for step in range(1, len(rows)):
            tokens_BR = ids_BT.gather(1, (at.place_BR + 1 + step).clamp(max=last))
            residual, inputs = cell.read(self.spec.embed(tokens_BR), cell.recycled(outs[-1]))
            query, *more = cell.layer.project(inputs, at.place_BR + first + step)
            keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
            mask = torch.cat([mask, diagonal], 2)
            outs.append(cell.layer(residual, query, keys, values, mask))
        return [at.flat(cell.norm(out), rows_M) for out, rows_M in zip(outs, rows, strict=True)]

    # -- decoding --------------------------------------------------------------------------------

    def read_committed(
        self, state: Memory | None, tokens_BM: Tensor, count_B: Tensor, features: Features
    ) -> Memory:
        """See `Head.read_committed`: step 1 at every row, from true states and tokens; nothing
        built from drafted states is kept."""
        features = {name: value[:, : tokens_BM.shape[1]] for name, value in features.items()}
        cell, cache = self.cells[0], None if state is None else state.caches[0]
        residual, inputs = cell.read(self.spec.embed(tokens_BM), self.first_state(features))
        first = self.first_position
        out_BW, cache = read_last(cell.layer, cache, residual, inputs, count_B, first)
        return Memory([cache], [out_BW], cache.length_B)

    def extend(
        self,
        state: Memory,
        tokens_BL: Tensor,
        parents_BLW: Tensor,
        slot_BL: Tensor,
        seen_BLN: Tensor,
    ) -> Tensor:
        """Raw outputs [B, L, W] behind draft nodes; `cells[0].norm` gives what the lm_head reads.

        Args:
            parents_BLW: raw output at each node's parent, from whose law the token came; at the
                root `state.outs[0]`.
            slot_BL: draft slot of each token, from 1.
            seen_BLN: over the N nodes of this round so far, the L new ones last: True for a node's
                ancestors and itself.
        """
        cell, cache = self.cells[0], state.caches[0]
        residual, inputs = cell.read(self.spec.embed(tokens_BL), cell.recycled(parents_BLW))
        last_B1 = state.length_B[:, None] - 1
        position_BL = last_B1 + slot_BL + self.first_position
        query, keys, values = cell.layer.project(inputs, position_BL)
        cache.draft(keys, values, seen_BLN.shape[2] - tokens_BL.shape[1])
        view = cache.view(last_B1.expand_as(tokens_BL), seen_BLN)
        return cell.layer(residual, query, *view)

    def step(
        self, state: Memory, paths_BLk: Tensor, place_BL: Tensor, memo: dict[str, Tensor]
    ) -> Tensor:
        """See `Head.step`."""
        (rows, nodes, slot), device = paths_BLk.shape, paths_BLk.device
        if slot == 1:
            memo["out"] = state.outs[0][:, None]
            memo["seen"] = torch.ones(rows, 1, 0, dtype=torch.bool, device=device)
        else:
            parents_BLW, above_BLN = (
                memo[name].gather(1, place_BL[..., None].expand(-1, -1, memo[name].shape[-1]))
                for name in ("out", "seen")
            )
            own = torch.eye(nodes, dtype=torch.bool, device=device).expand(rows, -1, -1)
            memo["seen"] = torch.cat([above_BLN, own], 2)
            slot_BL = torch.full_like(place_BL, slot - 1)
            memo["out"] = self.extend(state, paths_BLk[..., -1], parents_BLW, slot_BL, memo["seen"])
        return self.cells[0].norm(memo["out"])
