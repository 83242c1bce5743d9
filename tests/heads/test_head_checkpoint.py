"""A head's folder: what is in it, and what is refused, by name and in two lines."""

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import LLAMA, make_head, stock, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from selfdraft.heads import InputError, load_head, save_head
from selfdraft.heads.checkpoint import read_description, sha256
from selfdraft.inference.assembly import build_drafter
from selfdraft.inference.target import TargetModel

KINDS = {"medusa": {"lm_head": "own"}, "hydra": {"taps": [0, 2]}}


@cache
def other(seed: int = 0, **fields: Any) -> TargetModel:
    return TargetModel.load(random=LLAMA | fields, seed=seed, dtype="float32", device="cpu")


def saved(folder: Path, kind: str = "hydra", **fields: Any):
    fields = KINDS[kind] | fields
    head = make_head(kind, tiny().spec, draft_ids=[1, 4, 9, 30], **fields)
    save_head(folder, head, trained_length=64)
    return head


def edit(folder: Path, change: Any) -> None:
    path = folder / "head.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def refused(folder: Path, *words: str, target: TargetModel | None = None) -> None:
    with pytest.raises(InputError) as error:
        load_head(folder, (target or tiny()).spec)
    assert len(str(error.value).splitlines()) == 2
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    head = saved(tmp_path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_head(tmp_path, tiny().spec)
    assert again.config == head.config
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    for name, tensor in head.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name
    assert {p.name for p in tmp_path.iterdir()} == {"head.json", "model.safetensors"}


def test_description_says_what_is_needed(tmp_path: Path) -> None:
    saved(tmp_path)
    d = json.loads((tmp_path / "head.json").read_text())
    assert (d["format"], d["kind"], d["dtype"], d["trained_length"]) == (1, "hydra", "float32", 64)
    assert d["wiring"] == {"norm_stage": "post", "taps": [0, 2], "draft_vocab": 4}
    assert d["target"] == tiny().spec.identity
    assert {"random", "seed", "fingerprint", "tokenizer"} <= d["target"].keys()


def test_a_field_of_training_that_is_gone_is_no_matter(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, lambda d: d.pop("config_sha256"))  # there was none then
    edit(tmp_path, lambda d: d["config"].update(reach=0.5, on_policy=0.0))
    load_head(tmp_path, tiny().spec)
    edit(tmp_path, lambda d: d["config"].update(reached=0.5))
    refused(tmp_path, "reached")


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_shared_storage_is_saved_and_the_target_is_not(lm_head: str, tmp_path: Path) -> None:
    """C5: own lm_heads that are one tensor, once cloned and once not."""
    target = tiny("tied")
    head = make_head("medusa", target.spec, lm_head=lm_head, scale=0.0)
    if lm_head == "own":
        rows = target.weights.lm_head(None)
        head.lm_heads[0].data = head.lm_heads[1].data = rows
        head.lm_heads[2].data = rows.clone()
    save_head(tmp_path, head)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(head.state_dict())
    own = sum(t.nbytes for t in head.state_dict().values())
    assert (tmp_path / "model.safetensors").stat().st_size < own + 8192
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_head(tmp_path, target.spec)
    if lm_head == "own":
        assert all(w.equal(rows) for w in again.lm_heads)
        assert len({w.data_ptr() for w in again.lm_heads}) == 3
    else:  # it draws on the target's own storage
        before = again.draft_logits(torch.ones(1, 64), torch.ones(1, 1).long())
        assert again.spec.projector is target.spec.projector
        assert before.shape == (1, 320)
    assert not {p.data_ptr() for p in again.parameters()} & {
        p.data_ptr() for p in target.model.parameters()
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 128}, ("hidden_size", "64", "128")),
        ({"num_hidden_layers": 3}, ("num_layers", "2", "3")),
        ({"vocab_size": 400}, ("vocab_size", "320", "400")),
        ({"model_type": "qwen2"}, ("model_type", "llama", "qwen2")),
    ],
)
def test_another_target_is_refused_before_weights_load(fields, words, tmp_path: Path) -> None:
    """L2."""
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # the target is looked at first
    refused(tmp_path, *words, target=other(**fields))


def test_other_weights_are_refused_unless_allowed(tmp_path: Path) -> None:
    saved(tmp_path)
    refused(tmp_path, "weights", "fingerprint", target=other(seed=1))
    with pytest.warns(UserWarning, match="fingerprint"):
        load_head(tmp_path, other(seed=1).spec, allow_other_target=True)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    tokenizer = other(seed=0).tokenizer
    changed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template="{{ 1 }}"
    )
    refused(tmp_path, "tokenizer", target=TargetModel(stock(LLAMA), changed))
    load_head(tmp_path, TargetModel(stock(LLAMA), None).spec)  # without one, nothing to compare


def test_another_dtype_is_cast_with_a_note(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.warns(UserWarning, match="float32.*bfloat16.*cast"):
        head = load_head(tmp_path, TargetModel(stock(LLAMA, dtype=torch.bfloat16)).spec)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert head.draft_ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.update(kind="medusa"), "kind"),
        (lambda d: d.update(kind="heydra"), "hydra"),
        (lambda d: d["config"].update(depth=4), "missing mlps.3"),
        (lambda d: d["config"].update(depth=2), "unexpected mlps.2"),
        (lambda d: d["config"].update(layers=1), "missing mlps.0.blocks"),
        (lambda d: d["config"].update(width=7), "has shape"),
        (lambda d: d["config"].update(taps=[]), "unexpected tap_norm"),
        (lambda d: d["config"].update(widht=7), "widht"),
        (lambda d: d["config"].update(depth="three"), "depth"),
        (lambda d: d.update(format=2), "version 2"),
        (lambda d: d.pop("format"), "damaged"),
        (lambda d: d.pop("target"), "target"),
        (lambda d: d.update(sha256="0"), "checksum"),
        (lambda d: d.update(sharpness=[1.0]), "sharpness"),
        (lambda d: d.update(sharpness="abc"), "sharpness"),
        (lambda d: d.update(sharpness=[1.0, 0.0, 1.0]), "sharpness"),
        (lambda d: d.update(tau_t1_by_depth=[0.5]), "tau_t1_by_depth"),
        (lambda d: d.update(tau_t1_by_depth=[0.5, -0.1, None]), "tau_t1_by_depth"),
        (lambda d: d["config"].update(width=10**15), "sizes"),
        # Edits that every shape survives.
        (lambda d: d["config"].update(taps=[1, 2]), "wiring"),
        (lambda d: d["config"].update(draft_vocab=99), "wiring"),
        (lambda d: d["wiring"].update(norm_stage="pre"), "wiring"),
        (lambda d: d.pop("wiring"), "wiring"),
        (lambda d: d["target"].pop("fingerprint"), "fingerprint is missing"),
    ],
)
def test_edits_are_named(change, word: str, tmp_path: Path) -> None:
    """C2."""
    saved(tmp_path)
    edit(tmp_path, change)
    refused(tmp_path, word)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_weights(size: int, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(tmp_path, "model.safetensors", "checksum")
    # A file that was already torn when it was described is refused as well.
    edit(tmp_path, lambda d: d.update(sha256=sha256(path)))
    refused(tmp_path, "model.safetensors")


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["stray"] = tensors.pop("hidden_norm.weight")
    save_file(tensors, path)
    edit(tmp_path, lambda d: d.update(sha256=sha256(path)))
    refused(tmp_path, "missing hidden_norm.weight", "unexpected stray")


@pytest.mark.parametrize("name", ["head.json", "model.safetensors"])
def test_missing_files(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / name).unlink()
    refused(tmp_path, name)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "\xff\xfe", "[" * 100_000], ids=lambda text: text[:4]
)
def test_damaged_description(text: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "head.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, "damaged")


@pytest.mark.parametrize(
    ("accepted", "rates"),
    [([0.4, 0.1, None], (0.4, 0.25, 0.5)), ([0.4, 0.0, 0.0], (0.4, 0.0, 0.5)), (None, ())],
)
def test_rates_of_drawn_tokens_are_read(accepted: Any, rates: tuple, tmp_path: Path) -> None:
    head = make_head("hydra", tiny().spec)
    save_head(tmp_path, head, tau_t1_by_depth=accepted)
    assert load_head(tmp_path, tiny().spec).rates == rates


# -- writing -------------------------------------------------------------------------------------


def test_a_head_that_was_packed_is_not_saved(tmp_path: Path) -> None:
    saved(tmp_path / "whole")
    head = build_drafter("heads", tiny(), tmp_path / "whole")
    if not tiny().packed:
        pytest.skip("no packed linears here")
    with pytest.raises(InputError, match="packed for decoding") as error:
        save_head(tmp_path / "packed", head)
    assert len(str(error.value).splitlines()) == 2
    assert not (tmp_path / "packed").exists()


def test_what_cannot_be_written_leaves_the_old_pair(tmp_path: Path) -> None:
    head = saved(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    head.mlps[0].out.weight.data.add_(1.0)
    for note in ("\udcff", {1, 2}):
        with pytest.raises((UnicodeEncodeError, TypeError)):
            save_head(tmp_path, head, note=note)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_description_is_utf_8(tmp_path: Path) -> None:
    save_head(tmp_path, make_head("hydra", tiny().spec), note="modèle")
    assert "modèle".encode() in (tmp_path / "head.json").read_bytes()
    assert read_description(tmp_path)["note"] == "modèle"


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    kept = [".head.json.7", ".other.json.8", ".head.json.swp", ".head.8"]
    for name in (*kept, ".head.json.8", ".model.safetensors.8"):
        (tmp_path / name).write_text("torn")
        if not name.endswith(".7"):  # which another process writes to just now
            os.utime(tmp_path / name, (0, 0))
    saved(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"head.json", "model.safetensors", *kept}
