"""A target that is spread over memory and disk is the target that is loaded whole."""

import json
from pathlib import Path

import pytest
import torch
from fixtures import PROMPTS, TARGETS, plain
from safetensors.torch import load_file
from training import make_config, save_target, train

from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.scripts.prepare_data import prepare
from selfdraft.train import setup

MIXED = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
MIXED |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
DISK = {"": "disk"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("base"))


def load(folder: Path, **options) -> TargetModel:
    return TargetModel.load(str(folder), dtype="float32", **options)


@pytest.mark.parametrize("place", [DISK, MIXED, "auto"], ids=["disk", "mixed", "auto"])
def test_it_answers_and_is_named_like_the_whole_one(base, place):
    whole, spread = load(base, device="cpu"), load(base, device_map=place)
    assert spread.spec.identity == whole.spec.identity
    assert any(p.is_meta for p in spread.model.parameters()) == (place != "auto")
    assert plain(spread, PROMPTS, 16) == plain(whole, PROMPTS, 16)
    ids, taps = torch.tensor([PROMPTS[1]]), [0, 1, 2]
    lengths = torch.tensor([len(PROMPTS[1])])
    for name, value in whole.features(ids, lengths, taps).items():
        torch.testing.assert_close(spread.features(ids, lengths, taps)[name], value)


@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "granite", "qwen3", "gpt2"])
def test_heads_start_from_the_same_weights(tmp_path, name):
    """And embed and project alike, whatever the family does around its ends."""
    save_target(tmp_path, TARGETS[name])
    whole, spread = load(tmp_path, device="cpu"), load(tmp_path, device_map=DISK)
    assert spread.spec.identity == whole.spec.identity
    one, other = whole.weights, spread.weights
    assert other.last_layer.keys() == one.last_layer.keys()
    for key, weight in one.last_layer.items():
        assert torch.equal(other.last_layer[key], weight), key
    torch.testing.assert_close(other.norm_scale, one.norm_scale)
    assert torch.equal(other.lm_head(None), one.lm_head(None))
    ids, hidden = torch.arange(9), torch.randn(3, 64)
    assert torch.equal(spread.spec.embed(ids), whole.spec.embed(ids))
    torch.testing.assert_close(spread.spec.logits(hidden), whole.spec.logits(hidden))


def test_a_spread_target_fills_the_cache_that_its_ends_train_from(base, tmp_path, monkeypatch):
    target = {"random": None, "model": str(base), "device": "auto"}
    features = {"cache_only": True, "dtype": "float32"}
    runs = []
    for name, place in (("whole", None), ("spread", DISK)):
        (tmp_path / name).mkdir()
        named = {**target, "device_map": place}
        runs.append(make_config(tmp_path / name, target=named, data={"features": features}))
        assert prepare(runs[-1]) == 0
    monkeypatch.setattr(setup.TargetModel, "load", None)  # the layers are not loaded again
    taus = [train(config).tau for config in runs]
    assert taus[0] == pytest.approx(taus[1], abs=1e-6)
    for name in ("cache-*/chunk-00000.safetensors", "target/ends.safetensors"):
        found = [load_file(*(Path(config.output_dir) / "features").glob(name)) for config in runs]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    notes = [Path(config.output_dir) / "features" / "target" / "target.json" for config in runs]
    assert len({json.dumps(json.loads(path.read_text())["identity"]) for path in notes}) == 1


def test_what_does_not_go_with_a_device_map_is_said(base, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"a device map, and device 'cpu'"):
        load(base, device="cpu", device_map="auto")
    with pytest.raises(InputError, match=r"adapter 'x'\nMerge the adapter first"):
        load(base, adapter="x", device_map="auto")
    with pytest.raises(InputError, match="for a random target"):
        TargetModel.load(random=TARGETS["llama"], device_map="auto")
    with (
        pytest.warns(UserWarning, match="do not match"),
        pytest.raises(InputError, match=r"cannot be loaded.*\nSet device_map to auto"),
    ):
        load(base, device_map={"nowhere": "disk"})
    named = {"random": None, "model": str(base), "device": "auto", "device_map": "auto"}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"device_map in 2 processes.*\nRun .*cache_only=true"):
        setup.load_target(make_config(tmp_path, target=named))
