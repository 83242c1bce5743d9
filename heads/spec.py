"""The frozen target, as heads see it.

Shape suffixes: B rows, L nodes of a level, E ids of each row, W hidden width, D draft vocabulary, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetSpec:
    """What heads know of their frozen target: sizes and callables, never its modules.

    Attributes:
        embed: ids [..] -> embeddings [.., W], with the target's own scaling.
        projector: (rows, drafting) -> a function from hidden [.., W] to logits [.., V], or
            [.., len(rows)] when `rows` [D] picks vocabulary rows; with rows [B, E] of their own,
            from hidden [B, L, W] to [B, L, E].  With drafting=True it may be rounded, and serves
            drafts only; with drafting=False gradients reach hidden.
        identity: what is written into head.json to recognise the target again.
        config: the target's text config, whose head width and rotary settings heads copy.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int
    embed: Callable[[Tensor], Tensor]
    projector: Callable[[Tensor | None, bool], Callable[[Tensor], Tensor]]
    identity: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    config: Any

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits of `hidden` [.., W] through the dense lm_head, scaling included."""
        return self.projector(rows, False)(hidden)


@dataclass(frozen=True)
class TargetWeights:
    """Dense weights of the target that a new head may start from; they are copied, never shared.

    Attributes:
        lm_head: rows [D] or None -> [D, W] or [V, W]; raises InputError where it is not dense.
        norm_scale: [W] what the final norm multiplies by; None where there is none to be found.
        last_layer: of the last decoder layer: q_proj, k_proj, v_proj, gate_proj and up_proj, and
            the scales input_norm and mlp_norm; what is not there is left out.
    """

    lm_head: Callable[[Tensor | None], Tensor]
    norm_scale: Tensor | None
    last_layer: dict[str, Tensor]
