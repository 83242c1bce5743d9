"""EAGLE against its formula, its switches, and the layouts that it is stored in."""

import json
from pathlib import Path

import pytest
import torch
from attention_reference import Seen, layer_output, rms
from fixtures import LLAMA, batch_of, double, make_head, stock, tiny
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from selfdraft.heads import HEADS, InputError, load_head, objectives, save_head
from selfdraft.heads.base import Head, tap_layers
from selfdraft.heads.losses import loss_rows
from selfdraft.heads.spec import TargetWeights
from selfdraft.inference.target import TargetModel

DEPTH = 3
SETTINGS = [
    {"taps": [0, 1]},
    {"taps": [0, 1, 2], "fusion": "fc", "tap_norm": False},
    {"taps": [1], "recycle": "normed", "norm_stage": "post", "norm_before_residual": True},
    {"taps": [], "norm_stage": "post"},
]


def first_states(head: Head, features: dict[str, Tensor], row: int) -> list[Tensor]:
    """o^{-1}_s of each row s."""
    states, fields = [], head.config
    for s, hidden in enumerate(features["hidden"][row]):
        taps = features["taps"][row, s] if head.taps else []
        last = taps[-1] if fields.norm_stage == "pre" and fields.fusion == "residual" else hidden
        if not fields.taps:
            states.append(last)
            continue
        joined = [
            rms(taps[i], head.tap_norm.norms[i].weight) if fields.tap_norm else taps[i]
            for i in range(len(fields.taps))
        ]
        fused = head.tap_in.weight @ torch.cat(joined)
        states.append(fused if fields.fusion == "fc" else last + fused)
    return states


@pytest.mark.parametrize("fields", SETTINGS)
@torch.no_grad()
def test_states_are_those_of_the_formula(fields: dict) -> None:
    target, batch = double(), batch_of([11, 8], prompt=2)
    head = make_head("eagle", target.spec, depth=DEPTH, **fields)
    cell, embed = head.cells[0], target.spec.embed
    features = target.features(batch["ids"], batch["length"], head.taps)

    def seen(x: Tensor, state: Tensor, s: int, i: int) -> Seen:
        """[RMS(e(x_{s+1+i})); RMS(o)] of step i at row s, at position s + i."""
        halves = rms(embed(x[s + 1 + i]), cell.embed_norm.weight)
        return Seen(torch.cat([halves, rms(state, cell.hidden_norm.weight)]), s + i)

    for row, t in ((0, 6), (1, 3)):
        x, first = batch["ids"][row], first_states(head, features, row)
        past, state = [seen(x, first[s], s, 0) for s in range(t)], first[t]
        got = head.unroll(batch, features, [torch.tensor([row * 11 + t])] * DEPTH)
        for i in range(DEPTH):
            past.append(seen(x, state, t, i))
            normed = fields.get("norm_before_residual")
            residual = rms(state, cell.hidden_norm.weight) if normed else state
            out = layer_output(cell.layer, residual, past[-1], past)
            normed_out = rms(out, cell.norm.weight)
            torch.testing.assert_close(got[i][0], normed_out, rtol=1e-5, atol=1e-5)
            state = normed_out if fields.get("recycle") == "normed" else out


@torch.no_grad()
def test_eagle_1s_loss_is_of_token_and_feature() -> None:
    target, batch = double(), batch_of([20, 13])
    heads = [
        make_head("eagle", target.spec, depth=DEPTH, taps=[], feature_loss=w) for w in (0.0, 10.0)
    ]
    features = target.features(batch["ids"], batch["length"], heads[0].taps)
    token, both = (head(batch, features)["loss"] for head in heads)
    rows = loss_rows(batch, DEPTH)
    states, hidden = heads[0].unroll(batch, features, rows), features["hidden"].flatten(0, 1)
    for k, (state, r) in enumerate(zip(states, rows, strict=True), start=1):
        each = functional.smooth_l1_loss(state, hidden[r + k], reduction="none").mean(-1)
        torch.testing.assert_close(both[k - 1], token[k - 1] + 10 * each.sum())


@pytest.mark.parametrize(
    ("taps", "layers", "expected"),
    [
        ([2, 16, 29], 32, [2, 16, 29]),
        ([2, 16, 29], 4, [2, 3, 4]),
        ([2, 16, 29], 1, [0, 1]),
        ([7], 2, [2]),
        ([0, 1, 2], 2, [0, 1, 2]),
        ([0, 3], 6, [0, 3]),
    ],
)
def test_taps_of_a_shallow_target_shift_apart(taps: list, layers: int, expected: list) -> None:
    assert tap_layers(taps, layers) == expected


# -- cases met elsewhere ---------------------------------------------------------------------------


def test_c2_the_layout_of_the_lm_head_is_the_configs(tmp_path: Path) -> None:
    """C2: one kind with and without an lm_head of its own; neither loads as the other."""
    target, ids = tiny(), list(range(0, 320, 3))
    head = make_head("eagle", target.spec, draft_ids=ids, lm_head="own", scale=0.0)
    head.init_from_target(target.weights)
    assert head.lm_head.equal(target.weights.lm_head(torch.tensor(ids)))
    save_head(tmp_path, head)
    assert load_head(tmp_path, target.spec).lm_head.equal(head.lm_head)
    description = json.loads((tmp_path / "head.json").read_text())
    description["config"]["lm_head"] = "shared"
    (tmp_path / "head.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="unexpected lm_head"):
        load_head(tmp_path, target.spec)


def test_c4_an_own_lm_head_of_a_tied_target_is_not_tied(tmp_path: Path) -> None:
    """C4: it is stored and comes back as trained, while the target's stays as it was."""
    target = tiny("tied")
    before = target.weights.lm_head(None).clone()
    head = make_head("eagle", target.spec, lm_head="own", scale=0.0)
    head.init_from_target(target.weights)
    head.lm_head.data.add_(1.0)
    save_head(tmp_path, head)
    assert load_head(tmp_path, target.spec).lm_head.equal(before + 1.0)
    assert target.weights.lm_head(None).equal(before)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_l4_r11_an_lm_head_without_a_dense_weight(kind: str) -> None:
    """L4, R11: a quantized or partitioned lm_head is needed only for a copy, and then named."""
    weights = tiny().weights

    def refuse(rows: Tensor | None) -> Tensor:
        raise InputError("the lm_head has no dense weight", "Share it.")

    packed = TargetWeights(refuse, weights.norm_scale, weights.last_layer)
    make_head(kind, tiny().spec).init_from_target(packed)
    if kind == "eagle":
        with pytest.raises(InputError, match="no dense weight"):
            make_head("eagle", tiny().spec, lm_head="own").init_from_target(packed)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_t8_no_tensor_is_as_large_as_the_logits_of_a_batch(kind: str, monkeypatch) -> None:
    """T8: rows without loss cost no logits, and those with one are computed in chunks."""
    vocab, rows, time, depth = 2000, 4, 60, 3
    target = TargetModel(stock(LLAMA | {"vocab_size": vocab}))
    head = make_head(kind, target.spec, depth=depth, draft_ids=list(range(vocab)), taps=[1])
    batch = batch_of([time] * rows, prompt=time - 12, vocab=vocab)
    features = target.features(batch["ids"], batch["length"], head.taps)
    monkeypatch.setattr(objectives, "CHUNK", 8 * vocab)
    head(batch, features)  # what is made once, such as picked rows of the lm_head
    with Largest() as largest:
        head(batch, features)["loss"].sum().backward()
    assert largest.elements < rows * time * vocab / 3
