"""Targets with a peft adapter train heads and generate like any target (L6)."""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
from fixtures import PROMPTS, plain, stock
from training import LLAMA, make_config, save_target, train

from selfdraft import Speculator
from selfdraft.heads.errors import InputError
from selfdraft.inference import loading
from selfdraft.inference.random_target import byte_tokenizer
from selfdraft.inference.target import TargetModel

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "lora": peft.LoraConfig(r=4, **LAYERS),
    "dora": peft.LoraConfig(r=4, use_dora=True, **LAYERS),
    "ia3": peft.IA3Config(feedforward_modules=["down_proj"], **LAYERS),
    "loha": peft.LoHaConfig(r=4, **LAYERS),
    "oft": peft.OFTConfig(oft_block_size=16, r=0, **LAYERS),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "layer norm": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
OUTSIDE = {
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"
    ),
    "poly": peft.PolyConfig(r=4, n_tasks=2, **LAYERS),
    "alora": peft.LoraConfig(
        r=4, alora_invocation_tokens=[7], task_type="CAUSAL_LM", target_modules=["q_proj"]
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of a tiny llama with a byte tokenizer."""
    return save_target(tmp_path_factory.mktemp("base"))


def write_adapter(folder: Path, config: peft.PeftConfig, seed: int = 0) -> peft.PeftModel:
    """An adapter with no part at zero; returns the adapted model."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(stock(LLAMA | {"initializer_range": 0.2}), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


def greedy(model: peft.PeftModel, tokens: int = 24) -> list[list[int]]:
    """peft's own answers to `PROMPTS`."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=byte_tokenizer().eos_token_id,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_is_the_adapted_model(base, tmp_path, kind):
    adapted = write_adapter(tmp_path, KINDS[kind])
    target = TargetModel.load(str(base), adapter=str(tmp_path), dtype="float32", device="cpu")
    answers = plain(target, PROMPTS, 24)
    assert answers == greedy(adapted)
    assert answers != plain(TargetModel.load(str(base), device="cpu"), PROMPTS, 24)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_kinds_that_work_outside_of_the_layers_are_refused_by_name(base, tmp_path, kind):
    write_adapter(tmp_path, OUTSIDE[kind])
    with pytest.raises(InputError, match=f"of kind {OUTSIDE[kind].peft_type.value}, which works"):
        TargetModel.load(str(base), adapter=str(tmp_path), device="cpu")


def test_virtual_tokens_are_refused_before_anything_loads(base, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", None)
    for kind in ("prompt", "prefix", "p-tuning"):
        write_adapter(tmp_path / kind, OUTSIDE[kind])
        capfd.readouterr()
        with pytest.raises(InputError, match=r"which works outside .*\nUse one that changes lay"):
            TargetModel.load(str(base), adapter=str(tmp_path / kind), device="cpu")
        assert capfd.readouterr().err == ""


def test_what_is_no_adapter_of_this_target_is_said(base, tmp_path, capfd):
    """And the two lines of the error stand alone: no bar of loaded weights before them."""
    write_adapter(tmp_path, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    config = tmp_path / "adapter_config.json"
    whole = config.read_text()
    capfd.readouterr()
    for path in (base, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"there is no .*adapter_config.json\nFix the path"):
            TargetModel.load(str(base), adapter=str(path), device="cpu")
    config.write_text(whole.replace('"q_proj"', '"query"'))
    with pytest.raises(InputError, match=r"does not fit the target: .*query.*\nGive one that was"):
        TargetModel.load(str(base), adapter=str(tmp_path), device="cpu")
    config.write_text(whole[:-9])
    with pytest.raises(InputError, match=r"cannot be loaded: .*\nGive a peft folder or hub id"):
        TargetModel.load(str(base), adapter=str(tmp_path), device="cpu")
    assert capfd.readouterr().err == ""


def test_heads_on_an_adapted_target(base, tmp_path):
    """Trained, saved, loaded on the same adapter; PeftModel and merged model; another adapter."""
    adapter, other = tmp_path / "adapter", tmp_path / "other"
    adapted = write_adapter(adapter, KINDS["lora"])
    elsewhere = write_adapter(other, KINDS["lora"], seed=1)
    files = [hashlib.sha256(p.read_bytes()).digest() for p in sorted(adapter.iterdir())]
    target = {"model": str(base), "random": None, "adapter": str(adapter)}
    train(make_config(tmp_path, target=target))
    assert files == [hashlib.sha256(p.read_bytes()).digest() for p in sorted(adapter.iterdir())]
    run = tmp_path / "run"
    identity = json.loads((run / "head.json").read_text())["target"]
    assert identity["adapter"] == str(adapter) and len(identity["adapter_fingerprint"]) == 16

    wanted = greedy(adapted)
    assert Speculator.from_pretrained(run).generate(PROMPTS, max_new_tokens=24).token_ids == wanted
    names = {"tokenizer": byte_tokenizer(), "allow_other_target": True}
    for model in (adapted, adapted.merge_and_unload()):
        with pytest.warns(UserWarning) if model is adapted else nullcontext():
            spec = Speculator.from_pretrained(run, target=model, **names)
        assert spec.generate(PROMPTS, max_new_tokens=24).token_ids == wanted
        ids = torch.tensor(PROMPTS[:1])  # a PeftModel hands its generate on to what it wraps
        out = model.generate(
            input_ids=ids, custom_generate=spec, max_new_tokens=24, do_sample=False
        )
        assert out[0, ids.shape[1] :].tolist() == wanted[0]

    with pytest.raises(InputError, match=rf"adapter .*adapter' there, .*{other}' here"):
        Speculator.from_pretrained(run, adapter=str(other))
    with pytest.raises(InputError, match=r"adapter .* there, no adapter here"):
        Speculator.from_pretrained(run, adapter=None)
    with pytest.warns(UserWarning, match="another fingerprint"):
        spec = Speculator.from_pretrained(run, adapter=str(other), allow_other_target=True)
    assert spec.generate(PROMPTS, max_new_tokens=24).token_ids == greedy(elsewhere)
    weights = "adapter_model.safetensors"
    (adapter / weights).write_bytes((other / weights).read_bytes())
    said = (
        rf"adapter '{adapter}' has other weights than it had .*\nLoad .* with adapter '{adapter}'"
    )
    with pytest.raises(InputError, match=said):
        Speculator.from_pretrained(run)
