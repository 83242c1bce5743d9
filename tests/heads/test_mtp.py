"""MTP against its formula, read off the paper, place by place."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_reference import Seen, layer_output, rms
from fixtures import PROMPTS, TARGETS, batch_of, double, make_head, tiny
from torch import Tensor
from torch.nn import Module

from selfdraft.heads import InputError, Plan, load_head, save_head
from selfdraft.inference import packed, rounded
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

DEPTH = 3
SETTINGS = [
    {},
    {"norm_stage": "post", "recycle": "normed"},
    {"concat": "hidden_first", "modules": "depth"},
    {"recycle": "normed", "modules": "depth"},
]


def mixed(cell: Module, embed_D: Tensor, state_D: Tensor, hidden_first: bool) -> Tensor:
    """W [RMS(e); RMS(h)]."""
    halves = [rms(embed_D, cell.embed_norm.weight), rms(state_D, cell.hidden_norm.weight)]
    return cell.project.weight @ torch.cat(halves[::-1] if hidden_first else halves)


@pytest.mark.parametrize("fields", SETTINGS)
@torch.no_grad()
def test_states_are_those_of_the_formula(fields: dict) -> None:
    target, batch = double(), batch_of([11, 8], prompt=2)
    head = make_head("mtp", target.spec, depth=DEPTH, **fields)
    features = target.features(batch["ids"], batch["length"], head.taps)
    embed, shared = target.spec.embed, fields.get("modules") != "depth"
    for row, t in ((0, 6), (1, 3)):
        x = batch["ids"][row]
        h = features["hidden" if fields.get("norm_stage") == "post" else "taps"][row].flatten(1)

        @cache
        def raw(k: int, s: int, x: Tensor = x, h: Tensor = h) -> Tensor:
            """h^k_s before the norm."""
            if k == 0:
                return h[s]
            cell = head.cells[0 if shared else k - 1]
            residual, query = read(k, s)
            # One module a depth: rows up to s of the same depth.  Shared: rows up to s of depth 1
            # and this row's own of depths 2..k.
            rows = [read(k, r)[1] for r in range(s)] if not shared else []
            if shared:
                rows = [read(1, r)[1] for r in range(s + 1)] if k > 1 else []
                rows += [read(j, s)[1] for j in range(2, k)]
                rows += [read(1, r)[1] for r in range(s)] if k == 1 else []
            return layer_output(cell.layer, residual, query, [*rows, query])

        @cache
        def read(k: int, s: int, x: Tensor = x) -> tuple[Tensor, Seen]:
            """Residual of depth k at row s, and what attention reads there."""
            cell, state = head.cells[0 if shared else k - 1], raw(k - 1, s)
            if k > 1 and fields.get("recycle") == "normed":
                state = rms(state, head.cells[0 if shared else k - 2].norm.weight)
            first = fields.get("concat") == "hidden_first"
            residual = mixed(cell, embed(x[s + k]), state, first)
            return residual, Seen(rms(residual, cell.input_norm.weight), s + k)

        at = torch.tensor([row * 11 + t])
        got = head.unroll(batch, features, [at] * DEPTH)
        for k in range(1, DEPTH + 1):
            norm = head.cells[0 if shared else k - 1].norm.weight
            torch.testing.assert_close(got[k - 1][0], rms(raw(k, t), norm), rtol=1e-5, atol=1e-5)


def test_modules_are_one_or_one_a_depth() -> None:
    spec = tiny().spec
    shared, own = (make_head("mtp", spec, depth=3, modules=m) for m in ("shared", "depth"))
    assert (len(shared.cells), len(own.cells)) == (1, 3)
    assert len({p.data_ptr() for p in own.parameters()}) == len(list(own.parameters()))


def test_r10_an_embedding_and_lm_head_of_its_own_it_has_not() -> None:
    names = make_head("mtp", tiny().spec).state_dict()
    assert names
    assert not any("lm_head" in name or "embed_tokens" in name for name in names)


def test_c2_a_module_fewer_than_the_config_says_is_refused(tmp_path: Path) -> None:
    """C2: the file holds three modules, head.json says four."""
    save_head(tmp_path, make_head("mtp", tiny().spec, depth=3, modules="depth"))
    path = tmp_path / "head.json"
    description = json.loads(path.read_text())
    description["config"]["depth"] = 4
    path.write_text(json.dumps(description))
    with pytest.raises(InputError, match=r"missing cells\.3"):
        load_head(tmp_path, tiny().spec)


def test_an_mtp_head_drafts_from_a_prompt_of_one_token() -> None:
    """The modules of later depths have no row yet."""
    target = tiny()
    for fields in SETTINGS:
        head = make_head("mtp", target.spec, depth=4, **fields)
        out = Speculator(target, head).generate([[3], [7, 1]], max_new_tokens=12)
        expected = Speculator(target).generate([[3], [7, 1]], max_new_tokens=12)
        assert out.token_ids == expected.token_ids


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
@pytest.mark.parametrize("make", [packed.product, rounded.product])
def test_a_packed_head_takes_one_product_a_step(kind: str, make: Any) -> None:
    """For queries, keys and values alike, of new tokens and of drafted ones."""
    target = TargetModel.load(random=TARGETS["llama"], dtype="float32", device="cpu")
    head = make_head(kind, target.spec, taps=[1])
    packed.pack_linears(head, make)
    layer = head.cells[0].layer
    if not isinstance(layer.q_proj, packed.SharedLinear):
        pytest.skip("no packed linears here")
    calls, inner = [], layer.q_proj.shared.product

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return inner(x)

    layer.q_proj.shared.product = counted
    rounds = Speculator(target, head, Plan(3)).generate(PROMPTS[0], max_new_tokens=8).stats.rounds
    # One product to read the prompt; a round drafts three tokens with two steps and reads its own.
    assert rounds < len(calls) <= 1 + 3 * rounds
