"""TargetModel against transformers: logits, taps, prefill, windows; and what it refuses."""

from typing import Any

import pytest
import torch
from fixtures import (
    EOS,
    LLAMA,
    PROMPTS,
    TARGETS,
    VOCAB,
    batch_of,
    double,
    plain,
    stock,
    tiny,
)
from torch import nn

from selfdraft.heads import InputError
from selfdraft.inference import packed
from selfdraft.inference.target import TargetModel

RECURRENT = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
ALIBI = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}


def refused(*words: str, **arguments: Any) -> None:
    with pytest.raises(InputError) as error:
        TargetModel.load(**arguments)
    assert len(str(error.value).splitlines()) == 2
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_logits_and_taps_are_transformers(name: str) -> None:
    """In float32, with packed linears where they are used; taps are hidden_states[i], and for the
    last layer its raw output, before the final norm."""
    target, model, batch = tiny(name), stock(TARGETS[name]), batch_of([40, 40])
    raw: list[torch.Tensor] = []
    layers = (
        model.get_decoder().layers
        if hasattr(model.get_decoder(), "layers")
        else model.transformer.h
    )
    hook = layers[-1].register_forward_hook(
        lambda m, a, out: raw.append(out[0] if isinstance(out, tuple) else out)
    )
    expected = model(batch["ids"], output_hidden_states=True)
    hook.remove()
    features = target.features(batch["ids"], batch["length"], [0, 1, 2])
    scale = expected.logits.abs().max()
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(
        target.logits(features["hidden"]) / scale, expected.logits / scale, **close
    )
    torch.testing.assert_close(target.spec.logits(features["hidden"]), expected.logits,
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    rows = torch.tensor([3, 7, 300])
    torch.testing.assert_close(target.spec.logits(features["hidden"], rows),
                               expected.logits[..., rows], rtol=1e-4, atol=1e-4)  # fmt: skip
    for tap, states in enumerate([*expected.hidden_states[:2], raw[0]]):
        torch.testing.assert_close(
            features["taps"][:, :, tap] / states.abs().max(), states / states.abs().max(), **close
        )


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_embed_is_what_enters_the_first_layer(name: str) -> None:
    if name == "gpt2":
        pytest.skip("GPT-2 adds positions to its embeddings")
    target, ids = tiny(name), torch.tensor([[3, 9, 200]])
    taps = target.features(ids, torch.tensor([3]), [0])["taps"]
    torch.testing.assert_close(target.spec.embed(ids), taps[:, :, 0])


@pytest.mark.parametrize("name", TARGETS)
def test_plain_greedy_is_transformers_generate(name: str) -> None:
    """Longer than a sliding window of 16, prompts of unlike length in one batch."""
    target, model = tiny(name), stock(TARGETS[name])
    for ids, ours in zip(PROMPTS, plain(target, PROMPTS, 40), strict=True):
        prompt = torch.tensor([ids])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False,
            pad_token_id=EOS, use_cache=True,
        )  # fmt: skip
        assert ours == theirs[0, len(ids) :].tolist()


def test_a_rows_features_do_not_depend_on_the_others() -> None:
    """T9: alone, in a padded batch, in another order, and on a second call."""
    target, batch = double("mistral"), batch_of([30, 7, 19])
    first = target.features(batch["ids"], batch["length"], [1])
    second = target.features(batch["ids"].flip(0), batch["length"].flip(0), [1])
    for row, length in enumerate([30, 7, 19]):
        alone = target.features(batch["ids"][row : row + 1, :length], torch.tensor([length]), [1])
        for name, value in alone.items():
            torch.testing.assert_close(first[name][row, :length], value[0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(
                second[name][2 - row, :length], value[0], rtol=1e-9, atol=1e-9
            )


def test_a_model_passed_in_is_not_modified() -> None:
    model = stock(LLAMA | {"generation_config": None})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, config = [type(m) for m in model.modules()], model.config.to_dict()
    target = TargetModel(model)
    plain(target, PROMPTS[:2], 8)
    target.features(torch.tensor([[1, 2, 3]]), torch.tensor([3]), [0, 2])
    assert target.packed == 0
    assert [type(m) for m in model.modules()] == modules
    assert model.config.to_dict() == config
    assert model.state_dict().keys() == before.keys()
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(m, hook) for m in model.modules() for hook in hooks)


def test_hooks_are_removed_after_a_failure() -> None:
    target = double()
    with pytest.raises((IndexError, RuntimeError)):
        target.features(torch.tensor([[VOCAB + 5]]), torch.tensor([1]), [0, 1, 2])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())


def test_dropout_is_off() -> None:
    target = tiny("gpt2")
    assert not any(m.training for m in target.model.modules())
    runs = [target.features(torch.tensor([[1, 2, 3]]), torch.tensor([3]), []) for _ in range(2)]
    assert runs[0]["hidden"].equal(runs[1]["hidden"])


@pytest.mark.skipif(packed.library() is None, reason="this PyTorch lacks the operators")
@torch.no_grad()
def test_packed_linears_give_the_same_and_free_their_weights() -> None:
    one, other = tiny("tied"), TargetModel.load(random=TARGETS["tied"], pack=False, device="cpu")
    assert one.packed == 14
    assert other.packed == 0
    assert one.conditions()["linears"] == f"{packed.library()}-packed (14)"
    assert other.conditions()["linears"] == "torch"
    assert one.spec.identity == other.spec.identity  # fingerprints are taken before packing
    assert not any(isinstance(m, nn.Linear) for m in one.decoder.modules())
    assert one.lm_head.weight is one.model.get_input_embeddings().weight  # still tied
    batch = batch_of([20])
    a, b = (t.logits(t.features(batch["ids"], batch["length"], [])["hidden"]) for t in (one, other))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "granite", "gemma2"])
def test_logits_are_the_same_with_gradients_and_without(name: str) -> None:
    """Without, they may come of packed weights."""
    target, hidden = tiny(name), torch.randn(3, 64, requires_grad=True)
    for rows in (None, torch.tensor([1, 5, 9])):
        project = target.spec.projector(rows, False)
        with torch.no_grad():
            fast = project(hidden)
        exact = project(hidden)
        assert exact.requires_grad and not fast.requires_grad
        torch.testing.assert_close(fast, exact.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "granite", "gemma2"])
def test_gradients_reach_hidden_through_the_dense_lm_head(name: str) -> None:
    target = tiny(name)
    hidden = torch.randn(3, 64, requires_grad=True)
    model = stock(TARGETS[name])
    weight = model.lm_head.weight.detach()
    (got,) = torch.autograd.grad(target.spec.logits(hidden).square().sum(), hidden)
    logits = hidden @ weight.T
    if name == "granite":
        logits = logits / 4.0
    if name == "gemma2":
        logits = 5.0 * torch.tanh(logits / 5.0)
    (expected,) = torch.autograd.grad(logits.square().sum(), hidden)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert target.lm_head.weight.grad is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_fingerprints_tell_targets_apart(name: str) -> None:
    """Equal for equal weights, by seed else; the rounded one survives another dtype."""
    fields = TARGETS[name]
    identity = tiny(name).spec.identity
    again = TargetModel.load(random=fields, device="cpu").spec.identity
    other = TargetModel.load(random=fields, seed=1, device="cpu").spec.identity
    half = TargetModel(stock(fields, dtype=torch.bfloat16)).spec.identity
    assert identity == again
    assert other["fingerprint"] != identity["fingerprint"]
    assert other["fingerprint_bf16"] != identity["fingerprint_bf16"]
    assert half["fingerprint"] != identity["fingerprint"]
    assert half["fingerprint_bf16"] == identity["fingerprint_bf16"]


def test_a_random_target_leaves_the_callers_random_state() -> None:
    before = torch.get_rng_state()
    TargetModel.load(random=LLAMA, device="cpu")
    assert torch.get_rng_state().equal(before)


def test_chat_ids_and_eos() -> None:
    target = tiny()
    ids = target.chat_ids([{"role": "user", "content": "hi"}])
    assert target.tokenizer.decode(ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert target.eos_ids == {EOS} == {target.tokenizer.eos_token_id}


@pytest.mark.parametrize("fields", [RECURRENT, ALIBI], ids=["recurrent", "ALiBi"])
def test_models_that_cannot_be_drafted_for_are_refused(fields: dict[str, Any]) -> None:
    refused(fields["model_type"], "Supported", random=fields, device="cpu")


def test_unknown_scaling_of_logits_is_refused() -> None:
    model = stock(LLAMA)
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(InputError, match="logits differ"):
        TargetModel(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ("one of model and random",)),
        ({"model": "x", "random": LLAMA}, ("one of model and random",)),
        ({"random": {"hidden_size": 64}}, ("model_type",)),
        ({"random": {"model_type": "lama"}}, ("lama",)),
        ({"random": LLAMA | {"num_attention_heads": 0}}, ("makes no model",)),
        ({"random": LLAMA | {"intermediate_size": "x"}}, ("makes no model", "intermediate_size")),
        ({"random": LLAMA | {"hidden_sise": 64}}, ("hidden_sise", "llama", "'hidden_size'")),
        ({"random": LLAMA | {"vocab_size": True}}, ("makes no model", "vocab_size")),
        ({"random": LLAMA, "dtype": "float23"}, ("float23", "float32")),
        ({"random": LLAMA, "device": "tpu9"}, ("tpu9",)),
        ({"model": "package://no_such_package"}, ("no_such_package", "pip install")),
        ({"model": "/no/such/folder"}, ("/no/such/folder",)),
        ({"model": "nobody/nothing"}, ("nobody/nothing",)),
    ],
)
def test_bad_names(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(*words, **arguments)


@pytest.mark.parametrize("model_type", ["mistral", "qwen3"])
def test_a_random_config_that_cannot_run_is_refused(model_type: str) -> None:
    """Their default is more key heads than 4 query heads."""
    fields = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    refused(model_type, random=fields | {"model_type": model_type}, device="cpu")


@pytest.mark.parametrize("files", [[], ["config.json"], ["config.json", "model.safetensors"]])
def test_a_folder_without_weights(files: list[str], tmp_path) -> None:
    stock(LLAMA).save_pretrained(tmp_path / "whole")
    tiny().tokenizer.save_pretrained(tmp_path / "part")
    for name in files:
        data = (tmp_path / "whole" / name).read_bytes()
        (tmp_path / "part" / name).write_bytes(data[:500] if name.endswith("tensors") else data)
    refused(str(tmp_path / "part"), model=str(tmp_path / "part"), device="cpu")


def test_a_saved_folder_loads(tmp_path) -> None:
    stock(TARGETS["tied"]).save_pretrained(tmp_path)
    tiny("tied").tokenizer.save_pretrained(tmp_path)
    target = TargetModel.load(str(tmp_path), device="cpu")
    assert target.spec.identity["fingerprint"] == tiny("tied").spec.identity["fingerprint"]
    assert target.spec.identity["tokenizer"] == tiny("tied").spec.identity["tokenizer"]
    assert plain(target, PROMPTS[:1], 8) == plain(tiny("tied"), PROMPTS[:1], 8)


def test_a_random_target_ends_at_its_tokenizers_end() -> None:
    fields = {name: value for name, value in TARGETS["llama"].items() if name != "eos_token_id"}
    target = TargetModel.load(random=fields)
    assert target.eos_ids == {target.tokenizer.eos_token_id}
