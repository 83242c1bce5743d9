"""The cache knows what it was made from; and training that reads nothing else of the target."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from chats import CHAT, CHATML, bpe, make_target
from chats import make_config as chat_config
from fixtures import TARGETS, tiny
from rich.console import Console
from safetensors.torch import load_file
from training import documents, make_config, train

from selfdraft.heads.errors import InputError
from selfdraft.heads.protocols import Features
from selfdraft.inference.embeddings import TargetEnds, save_ends
from selfdraft.scripts.prepare_data import prepare
from selfdraft.scripts.show_mask import show
from selfdraft.train import setup
from selfdraft.train.data import load_documents
from selfdraft.train.distill import FeatureCache, open_features
from selfdraft.train.rounding import SCALE, decode, encode

ROWS = [{"messages": CHAT[:2]}, {"messages": CHAT}, {"messages": CHAT[2:4]}]


# -- rounding ------------------------------------------------------------------------------------


def states(width: int) -> Features:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, width, generator=generator)
    hidden[:, 3] *= 300  # channels of trained models differ so
    hidden[7] = 0
    return {"hidden": hidden, "taps": torch.randn(50, 2, width, generator=generator)}


@pytest.mark.parametrize("width", [576, 48, 7])
def test_rounding_stays_within_what_it_states(width):
    found = states(width)
    for dtype, bound in (("float32", 0.0), ("bfloat16", 2**-8)):
        back = decode(encode(found, dtype), torch.float32)
        for name, value in found.items():
            assert ((back[name] - value).abs() <= bound * value.abs()).all()
    stored = encode(found, "int8")
    back = decode(stored, torch.float32)
    for name, value in found.items():
        assert stored[name].dtype == torch.int8
        largest = value.unflatten(-1, (stored[name + SCALE].shape[-1], -1)).abs().amax(-1, True)
        error = (back[name] - value).unflatten(-1, (stored[name + SCALE].shape[-1], -1)).abs()
        assert (error <= largest / 254 * (1 + 1e-5)).all() and error.max() > 0
    assert back["hidden"].shape == found["hidden"].shape and not back["hidden"][7].any()


def test_what_is_not_finite_stays_so():
    hidden = torch.ones(3, 64)
    hidden[1, 5], hidden[2, 5] = torch.inf, torch.nan
    back = decode(encode({"hidden": hidden}, "int8"), torch.float32)["hidden"]
    assert back[0].isfinite().all() and not back[1].isfinite().all()
    assert not back[2].isfinite().all()


# -- what it is made from ------------------------------------------------------------------------


def features(config, target):
    """The run's features by row, how they came, and the rows' ids."""
    found = load_documents(config, target)
    asked: list[int] = []
    whole = target.features
    target.features = lambda ids, *rest: asked.append(len(ids)) or whole(ids, *rest)
    try:
        source = open_features(config, target, found, [1])
    finally:
        del target.features
    return source.get(found.train), sum(asked), [d.ids for d in found.train]


def test_d11_a_change_of_template_length_or_text_is_seen(tmp_path):
    """D11: an unchanged second run computes nothing, any change computes everything anew."""
    target = make_target(bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None))
    config = chat_config(tmp_path, ROWS)
    first, computed, ids = features(config, target)
    assert computed == 3 and features(config, target)[1] == 0
    torch.testing.assert_close(features(config, target)[0], first, atol=0, rtol=0)
    target.tokenizer.chat_template = "Chat: " + CHATML
    _, computed, other = features(config, make_target(target.tokenizer))
    assert computed == 3 and other != ids
    target.tokenizer.chat_template = CHATML
    _, computed, other = features(chat_config(tmp_path, ROWS, max_length=20), target)
    assert computed == 3 and other != ids
    file, text = config.answers_file, json.dumps(CHAT[1]["content"])
    _, _, ids = features(config, target)
    file.write_text(file.read_text().replace(text, text.replace("Eight", "Seven")))
    _, computed, other = features(config, target)
    assert computed == 3 and other != ids


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cache_of_more_taps_serves_fewer(tmp_path, dtype):
    target, config = tiny(), make_config(tmp_path, data={"features": {"dtype": dtype}})
    rows = load_documents(config, target)
    wide = open_features(config, target, rows, [0, 1, 2])
    before = {path: path.read_bytes() for path in wide.folder.glob("*")}
    for taps in ([], [1], [0, 2]):
        narrow = open_features(config, target, rows, taps)
        assert {path: path.read_bytes() for path in wide.folder.glob("*")} == before
        found, all_ = narrow.get(rows.train), wide.get(rows.train)
        assert torch.equal(found["hidden"], all_["hidden"])
        assert torch.equal(found["taps"], all_["taps"][:, :, taps]) if taps else len(found) == 1


def test_normalisers_are_computed_once_and_only_for_acceptances(tmp_path, monkeypatch):
    """On a cache that was there; a damaged chunk of them is made anew, the states are not."""
    target, made = tiny(), []
    real = FeatureCache._compute_normalisers
    monkeypatch.setattr(
        FeatureCache, "_compute_normalisers", lambda self, n: made.append(n) or real(self, n)
    )

    def opened(**head) -> FeatureCache:
        config = make_config(tmp_path, head=head)
        return open_features(config, target, load_documents(config, target), [1])

    for head in ({"loss": "kl"}, {"loss": "tv", "draft_vocab": None}):
        assert opened(**head).normalisers is None
    cache = opened(loss={"kl": 1, "lk": 0.1})
    assert made == list(range(len(cache.chunks)))
    states = {path: path.stat().st_mtime_ns for path in cache.folder.glob("chunk-*")}
    opened(loss="accepted_length")
    broken = cache.normalisers.path(0)
    right = broken.read_bytes()
    broken.write_bytes(right[:-1] + b"x")
    opened(loss="tv")
    assert made == [*range(len(cache.chunks)), 0] and broken.read_bytes() == right
    assert states == {path: path.stat().st_mtime_ns for path in states}
    assert opened(loss="tv", draft_vocab=None, draft_coverage=0.5).normalisers is not None


def test_documents_may_be_split_otherwise(tmp_path):
    """Heads of another seed hold out other rows, and read the same cache."""
    target, config = tiny(), make_config(tmp_path)
    first = open_features(config, target, load_documents(config, target), [])
    other = make_config(tmp_path, data={"eval_prompts": 2}, seed=5)
    assert open_features(other, target, load_documents(other, target), []).fingerprint == (
        first.fingerprint
    )


# -- training without the target ------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_ends_embed_and_project_like_the_target(name, tmp_path):
    """With a family's scaling inside, tied or not."""
    target = tiny(name)
    save_ends(target, tmp_path)
    ends = TargetEnds.read(tmp_path, device="cpu", random=TARGETS[name], seed=0, model=None)
    hidden, ids = torch.randn(5, 64), torch.arange(20)
    assert torch.equal(ends.spec.embed(ids), target.spec.embed(ids))
    assert torch.equal(ends.spec.logits(hidden), target.spec.logits(hidden))
    assert ends.spec.identity == target.spec.identity and ends.eos_ids == target.eos_ids
    assert ends.chat_ids(CHAT) == target.chat_ids(CHAT)
    kept = sum(p.numel() for p in ends.model.parameters())
    assert kept <= 2 * 64 * target.spec.vocab_size
    with pytest.raises(InputError, match="only its embedding and lm_head"):
        ends.features(ids[None], torch.tensor([20]), [])


def cache_only(tmp_path: Path, **sections):
    data = sections.pop("data", {})
    features = {"cache_only": True, "folder": str(tmp_path / "features")}
    return make_config(tmp_path, data={"features": features, **data}, **sections)


def test_training_with_the_ends_alone_is_training_with_the_target(tmp_path, monkeypatch):
    config = cache_only(tmp_path)
    with pytest.raises(InputError, match=r"does not hold the target's embedding.*\nRun .*prepare"):
        train(config)
    assert prepare(config) == 0
    loaded = []
    read = TargetEnds.read
    monkeypatch.setattr(
        TargetEnds, "read", lambda *a, **k: loaded.append(read(*a, **k)) or loaded[-1]
    )
    monkeypatch.setattr(setup.TargetModel, "load", None)  # the whole target is not loaded
    assert train(config).tau is not None and len(loaded) == 1
    monkeypatch.undo()
    whole = make_config(tmp_path, output_dir=str(tmp_path / "whole"))
    train(whole)
    heads = [load_file(Path(c.output_dir) / "model.safetensors") for c in (config, whole)]
    torch.testing.assert_close(*heads, atol=0, rtol=0)


def test_an_incomplete_or_foreign_cache_is_refused_and_kept(tmp_path):
    config = cache_only(tmp_path)
    prepare(config)
    folder = tmp_path / "features"
    chunk, *_ = sorted(folder.glob("cache-*/chunk-*"))
    with pytest.raises(InputError, match="was made with other documents"):
        train(cache_only(tmp_path, data={"max_length": 40}))
    with pytest.raises(InputError, match="was made with other taps"):
        train(cache_only(tmp_path, head={"kind": "hydra", "depth": 3, "taps": [1]}))
    with pytest.raises(InputError, match=r"ends of a target with seed 0, the config has 1"):
        train(cache_only(tmp_path, seed=1))
    assert chunk.exists()
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1] + b"?")
    with pytest.raises(InputError, match=r"only 0 of 1 chunks whole\nRun scripts/prepare_data.py"):
        train(config)
    assert prepare(config) == 0 and chunk.read_bytes() == content
    ends = folder / "target" / "ends.safetensors"
    ends.write_bytes(ends.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"ends.safetensors is damaged"):
        train(config)


def test_a_tokenizer_that_was_changed_is_refused(tmp_path):
    save_ends(tiny(), tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(InputError, match=r"tokenizer in .* is another one"):
        TargetEnds.read(tmp_path, device="cpu")


def test_online_features_are_rounded_alike(tmp_path):
    """A run without a cache learns from the same numbers as one with it, in every dtype."""
    target, rows = tiny(), documents([9, 14, 11])
    for dtype in ("float32", "bfloat16", "int8"):
        spec = {"features": {"dtype": dtype}}
        found = load_documents(make_config(tmp_path, data=spec), target)
        cached = open_features(make_config(tmp_path, data=spec), target, found, [1])
        spec["features"]["cache"] = False
        online = open_features(make_config(tmp_path, data=spec), target, found, [1])
        rows = found.train[:4]
        stored = cached.get(rows)
        for name, value in online.get(rows).items():
            tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "int8": 0.03}[dtype]
            torch.testing.assert_close(value, stored[name], atol=tolerance, rtol=tolerance)


def test_the_trained_tokens_are_coloured(tmp_path):
    config = make_config(tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    assert show(config, 1, console) == 0
    rows = load_documents(config, tiny())
    first = min(rows.train + rows.eval, key=lambda document: document.row)
    ids = [i for i, on in zip(first.ids, first.loss_mask, strict=True) if on]
    coloured = re.findall(r"\x1b\[30;(?:42|102)m([^\x1b]*)", console.file.getvalue())
    assert "".join(coloured) == tiny().tokenizer.decode(ids)
    assert "16 rows to train on, 4 held out" in console.file.getvalue()
