"""Checks at load that a target can be decoded in drafts: short forwards on fixed ids.

Shape suffixes: B rows, N nodes, D hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..heads.draft import Draft
from ..heads.errors import InputError

if TYPE_CHECKING:
    from .target import TargetModel

# Some families take their softmax in float32 whatever their weights are.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
LOW_PRECISION = 0.1  # bf16, fp16: relative to the largest entry


@torch.no_grad()
def probe_target(target: TargetModel) -> None:
    """Compares our logits and one branched draft with the model's own plain forwards.

    Raises:
        InputError: logits that the model scales in a way unknown here; positions or attention that
            ignore explicit positions or a 4-D mask (ALiBi, for one).
    """
    if target.device.type == "meta":
        return
    ids = torch.arange(8, device=target.device) * 7 % target.vocab_size
    draft = Draft(
        ids[None, 4:],
        torch.tensor([[-1, 0, 0, 1]]),
        torch.zeros(1, 4, dtype=torch.bool),
        torch.ones(1, 4, dtype=torch.bool),
    )
    # Every path of the branched draft as a row of its own, after a prompt of 4.
    paths = [torch.cat([ids[:4], ids[4:][draft.path(0, node)]]) for node in range(4)]
    lengths = torch.tensor([len(path) for path in paths])
    rows = torch.nn.utils.rnn.pad_sequence(paths, batch_first=True)
    kind = target.config.model_type
    try:
        hidden = target.features(rows, lengths, [])["hidden"]
        plain = target.model(input_ids=paths[3][None], use_cache=False).logits[0]
    except Exception as error:  # whatever a family's own code meets
        raise InputError(
            f"target {kind!r} does not run: {' '.join(str(error).split())[:200]}",
            "Check that the sizes of its config fit each other (heads, key heads, hidden size).",
        ) from error
    ours = target.logits(hidden[3, : len(paths[3])])
    if not _close(ours, plain):
        raise InputError(
            f"target {kind!r}: logits differ from the model's own by {_gap(ours, plain):.2g}",
            "This family scales its logits in a way selfdraft does not know; please report it.",
        )
    try:
        branched = _branched_states(target, ids[:4], draft)
    except Exception as error:  # whatever a family's own code meets
        raise InputError(
            f"target {kind!r} does not run on an explicit mask and positions: "
            f"{' '.join(str(error).split())[:200]}",
            "Supported are decoder-only models with full or sliding-window attention.",
        ) from error
    ends = hidden[torch.arange(4), lengths - 1]
    target.ragged = target.ragged and _runs_ragged(target, rows, lengths, ends)
    if not _close(branched, ends):
        raise InputError(
            f"target {kind!r}: a branched draft gives other states than plain forwards",
            "Its attention ignores explicit positions or the 4-D mask (ALiBi does).",
        )


def _branched_states(target: TargetModel, prompt: Tensor, draft: Draft) -> Tensor:
    """[N, D] states after each node of `draft` behind `prompt`."""
    cache = target.new_cache(1, 16)
    target.prefill(prompt[None], [len(prompt)], cache, [])
    depths = draft.depth_BN()
    return target.forward(draft.ids_BN, cache, draft.ancestors(), depths, [])["hidden"][0]


def _runs_ragged(target: TargetModel, rows: Tensor, lengths: Tensor, ends: Tensor) -> bool:
    """False for a family whose attention does not pass on how ragged rows are laid out, which then
    run with their padding."""
    cache = target.new_cache(len(rows), 16)
    try:
        states = target.prefill(rows, lengths.tolist(), cache, [])["hidden"]
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return _close(states[torch.arange(len(rows)), lengths - 1], ends)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = TOLERANCE.get(a.dtype, LOW_PRECISION)
    return _gap(a, b) <= tolerance * max(1.0, float(b.abs().max()))
