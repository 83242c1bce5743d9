"""What a new head starts from: the target's own state, and copies of its weights."""

import pytest
import torch
from fixtures import LLAMA, make_head, stock, tiny

from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

PREFIX = {"prefix_attention": True}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mtp", {}),
        ("mtp", {"modules": "depth", "taps": [1]}),
        ("mtp", {"norm_stage": "post", "recycle": "normed"}),
        ("eagle", {}),
        ("eagle", {"taps": []}),
        ("hydra", PREFIX),
        ("medusa", PREFIX | {"taps": [1]}),
    ],
)
@torch.no_grad()
def test_a_new_head_repeats_the_targets_state_at_every_step(kind: str, fields: dict) -> None:
    model = stock(LLAMA, dtype=torch.float64)
    weights = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.model.norm.weight.copy_(0.5 + weights)
    target = TargetModel(model)
    head = make_head(kind, target.spec, depth=3, scale=0.0, **fields)
    head.init_from_target(target.weights)
    ids = torch.arange(40, 60)[None]
    features = target.features(ids, torch.tensor([20]), head.taps)
    rows = torch.tensor([4, 9, 13])
    for state in head.unroll({"ids": ids}, features, [rows] * 3):
        torch.testing.assert_close(state, features["hidden"][0, rows], rtol=1e-4, atol=1e-4)


def test_a_new_layer_starts_from_the_targets_last_one() -> None:
    model = stock(LLAMA)
    target = TargetModel(model)
    head, last = make_head("mtp", target.spec, scale=0.0), model.model.layers[-1]
    head.init_from_target(target.weights)
    layer = head.cells[0].layer
    for name in ("q_proj", "k_proj", "v_proj"):
        assert getattr(layer, name).weight.equal(getattr(last.self_attn, name).weight)
    for name in ("gate_proj", "up_proj"):
        assert getattr(layer, name).weight.equal(getattr(last.mlp, name).weight)
    assert not layer.o_proj.weight.any()
    assert not layer.down_proj.weight.any()
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in head.parameters()}
    assert not shared
    behind = make_head("hydra", target.spec, scale=0.0, **PREFIX)
    behind.init_from_target(target.weights)
    assert behind.prefix.layer.q_proj.weight.equal(last.self_attn.q_proj.weight)
    small = make_head("mtp", target.spec, scale=0.0, width=24)
    small.init_from_target(target.weights)  # its MLP is narrower: left as it is
    assert small.cells[0].layer.q_proj.weight.equal(last.self_attn.q_proj.weight)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite", "qwen3", "mistral", "tied"])
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_heads_stand_on_every_family(name: str, kind: str) -> None:
    target = tiny(name)
    head = make_head(kind, target.spec, scale=0.0)
    head.init_from_target(target.weights)
    out = Speculator(target, head).generate([[1, 5, 9]], max_new_tokens=6)
    assert out.token_ids == Speculator(target).generate([[1, 5, 9]], max_new_tokens=6).token_ids


@pytest.mark.parametrize("name", ["llama", "granite", "tied"])
def test_an_lm_head_of_its_own_starts_with_the_targets_logits(name: str) -> None:
    """Scaled as the family scales them."""
    target, hidden = tiny(name), torch.randn(5, 64)
    head = make_head("medusa", target.spec, lm_head="own", scale=0.0)
    head.init_from_target(target.weights)
    ours = head.draft_logits(hidden, torch.zeros(5, 1, dtype=torch.int64))
    assert torch.allclose(ours, target.spec.logits(hidden), atol=1e-5)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_packing_the_target_keeps_what_heads_start_from(kind: str) -> None:
    """Linears that were packed have no weight any more; their weights were noted before."""
    packed, dense = tiny(), TargetModel(stock(LLAMA))
    heads = [make_head(kind, dense.spec, scale=0.0) for _ in range(2)]
    for head, target in zip(heads, (packed, dense), strict=True):
        head.init_from_target(target.weights)
    for mine, other in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert mine.equal(other)
