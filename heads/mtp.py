"""MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2): decoder layers that predict further tokens.

Depth k at row t: h^k_t = layer(W [RMS(e(x_{t+k})); RMS(h^{k-1}_t)]), h^0_t the target's state, and
lm_head(RMS(h^k_t)) the law of slot k.  One shared module is applied K times (FastMTP,
arXiv 2509.18362), or each depth has a module of its own.

With modules of their own, module k at row t attends to its own rows s <= t, whose tokens x_{s+k}
are all true in training.  In decoding the rows of one token x_p run together: module k at row
p - k, on what module k-1 gave at the token before.  So all caches are laid out by tokens, and
module k starts at the k-th.

Shape suffixes: B rows, T and M tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .base import register
from .kv import KVBuffer
from .layers import RMSNorm
from .past import row_mask
from .protocols import Features
from .sequence import Cell, Memory, SequenceConfig, SequenceHead
from .spec import TargetSpec, TargetWeights

Look = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(module, its new keys, values) -> keys, values and mask that the new tokens attend to."""


class MTPConfig(SequenceConfig):
    """Attributes:
    modules: one shared by all depths, or one a depth (which drafts chains only).
    concat: which half comes first in W's input: the embedding in released weights, the hidden
        state in the paper's formula and in MiMo.
    """

    kind: Literal["mtp"] = "mtp"
    modules: Literal["shared", "depth"] = "shared"
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"


class MTPCell(Cell):
    """A projection of both normed halves, then a plain decoder layer."""

    def __init__(self, spec: TargetSpec, config: MTPConfig) -> None:
        super().__init__(spec, config)
        width = spec.hidden_size
        self.embedding_first = config.concat == "embedding_first"
        self.project = nn.Linear(2 * width, width, bias=False)
        self.input_norm = RMSNorm(width)
        self.pass_state(torch.ones(width))

    def pass_state(self, factor_W: Tensor) -> None:
        """Lets W hand on the hidden half, each feature times its factor, and nothing else."""
        diagonal = factor_W.float().diag()
        parts = [torch.zeros_like(diagonal), diagonal]
        with torch.no_grad():
            self.project.weight.copy_(torch.cat(parts if self.embedding_first else parts[::-1], 1))

    def read(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Cell.read`."""
        parts = [self.embed_norm(embeds), self.hidden_norm(state)]
        x = self.project(torch.cat(parts if self.embedding_first else parts[::-1], -1))
        return x, self.input_norm(x)

    def init_from_target(self, weights: TargetWeights, norm_stage: str) -> None:
        """See `Cell.init_from_target`: W undoes the scale of a state behind the target's norm."""
        super().init_from_target(weights, "pre")
        if (theirs := weights.last_layer.get("input_norm")) is not None:
            self.input_norm.weight.data.copy_(theirs)
        scale = weights.norm_scale
        if norm_stage == "post" and scale is not None:
            least = 1e-3 * scale.abs().max()
            self.pass_state(torch.where(scale.abs() > least, 1 / scale, 0.0))


@register
class MTP(SequenceHead):
    """The target's embedding and lm_head around one decoder layer, or around one a depth."""

    kind = "mtp"
    Config = MTPConfig
    config: MTPConfig
    first_position = 1

    def __init__(
        self, config: MTPConfig, spec: TargetSpec, draft_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, spec, draft_ids)
        self.trees = config.modules == "shared"

    def make_cell(self) -> Cell:
        """See `SequenceHead.make_cell`."""
        return MTPCell(self.spec, self.config)

    def cell_count(self) -> int:
        """See `SequenceHead.cell_count`."""
        return 1 if self.config.modules == "shared" else self.config.depth

    def unroll(
        self, batch: dict[str, Tensor], features: Features, rows: list[Tensor]
    ) -> list[Tensor]:
        """See `Head.unroll`."""
        if self.config.modules == "shared":
            return super().unroll(batch, features, rows)
        ids_BT, documents = batch["ids"], batch.get("document")
        place_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)

        def look(module: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows_BT = None if documents is None else documents.roll(module, 1)
            return keys, values, row_mask(place_BT, rows_BT, module)

        first = self.first_state(features)
        outs = self._sweep(ids_BT.roll(-1, 1), first, place_BT + 1, None, look)
        # Row t of depth k stands at its token x_{t+k}, one place further on for each module.
        return [
            cell.norm(out).flatten(0, 1)[rows_M + module]
            for module, (cell, out, rows_M) in enumerate(zip(self.cells, outs, rows, strict=True))
        ]

    def _sweep(
        self,
        tokens_BM: Tensor,
        first_BMW: Tensor,
        position_BM: Tensor,
        before: list[Tensor] | None,
        look: Look,
    ) -> list[Tensor]:
        """Raw outputs [B, M, W] of each module at further tokens.

        Args:
            first_BMW: the target's state one row before each token.
            before: raw outputs [B, W] of each module at the token before; None: there is none.
        """
        embeds, state, outs = self.spec.embed(tokens_BM), first_BMW, []
        for module, cell in enumerate(self.cells):
            residual, inputs = cell.read(embeds, state)
            query, keys, values = cell.layer.project(inputs, position_BM)
            out = cell.layer(residual, query, *look(module, keys, values))
            outs.append(out)
            previous = torch.zeros_like(out[:, 0]) if before is None else before[module]
            state = cell.recycled(torch.cat([previous[:, None], out[:, :-1]], 1))
        return outs

    def read_committed(
        self, state: Memory | None, tokens_BM: Tensor, count_B: Tensor, features: Features
    ) -> Memory:
        """See `SequenceHead.read_committed`."""
        if self.config.modules == "shared":
            return super().read_committed(state, tokens_BM, count_B, features)
        features = {name: value[:, : tokens_BM.shape[1]] for name, value in features.items()}
        length_B = torch.zeros_like(count_B) if state is None else state.length_B
        place_BM = length_B[:, None] + torch.arange(tokens_BM.shape[1], device=count_B.device)
        caches: list[KVBuffer] = []

        def look(module: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if state is None:
                caches.append(KVBuffer.of(keys, values, count_B, module))
            else:
                caches.append(state.caches[module].append(keys, values, count_B))
            return caches[-1].view(place_BM)

        before = None if state is None else state.outs
        first = self.first_state(features)
        outs = self._sweep(tokens_BM, first, place_BM + 1, before, look)
        last = torch.arange(len(count_B), device=count_B.device), count_B - 1
        return Memory(caches, [out[last] for out in outs], length_B + count_B)

    def step(
        self, state: Memory, paths_BLk: Tensor, place_BL: Tensor, memo: dict[str, Tensor]
    ) -> Tensor:
        """See `Head.step`; with a module a depth, the newest token passes through every module
        that has a row for it."""
        if self.config.modules == "shared":
            return super().step(state, paths_BLk, place_BL, memo)
        slot, last_B1 = paths_BLk.shape[-1], state.length_B[:, None] - 1
        if slot == 1:
            memo.update({str(module): out[:, None] for module, out in enumerate(state.outs)})
            return self.cells[0].norm(memo["0"])
        embeds, below = self.spec.embed(paths_BLk[..., -1]), dict(memo)
        place_BN = last_B1 + 1 + torch.arange(slot - 1, device=embeds.device)
        for module in range(slot - 1, len(self.cells)):
            cell, cache = self.cells[module], state.caches[module]
            recycled = self.cells[module - 1].recycled(below[str(module - 1)])
            residual, inputs = cell.read(embeds, recycled)
            query, keys, values = cell.layer.project(inputs, last_B1 + slot)
            cache.draft(keys, values, slot - 2)
            # As everywhere, a token before the module's first is seen by itself alone.
            seen_BN = place_BN >= place_BN[:, -1:].clamp(max=module)
            view = cache.view(last_B1, seen_BN[:, None])
            memo[str(module)] = cell.layer(residual, query, *view)
        return self.cells[slot - 1].norm(memo[str(slot - 1)])
