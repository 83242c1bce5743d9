"""Every public argument of a wrong kind: an error of two lines that names it, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import PROMPTS, TARGETS, make_head, plain, stock, tiny
from torch import Tensor
from transformers import LogitsProcessor

from selfdraft.heads import InputError, Plan, save_head
from selfdraft.inference import prefill
from selfdraft.inference.drafters import Merged, Plain
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.train.recording import Recorder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tmp_path, make_head("hydra", tiny().spec, depth=2, scale=0.02, draft_ids=[3, 5, 9]))
    return tmp_path


def refused(error: pytest.ExceptionInfo[ValueError]) -> bool:
    return isinstance(error.value, InputError) and len(str(error.value).splitlines()) == 2


CALLS: list[dict[str, Any]] = [
    *({"max_new_tokens": value} for value in ("4", True, 2.0, None, torch.tensor(4))),
    *({"stop_strings": value} for value in (5, (s for s in "ab"), {"a": 1}, [5], b"a", True)),
    {"chat": "no"},
    {"chat": None},
    *({"temperature": value} for value in (1e39, 10**400, float("inf"), True)),
    *({name: float("nan")} for name in ("top_p", "min_p", "top_h", "typical_p", "top_k")),
    {"top_k": 2.5},
    {"repetition_penalty": 1e39},
    {"repetition_penalty": 1e-46},
    {"do_sample": 1},
]


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("given", CALLS, ids=lambda s: str(s)[:40])
def test_arguments_of_a_call(given: dict[str, Any], call: str) -> None:
    with pytest.raises(InputError, match=next(iter(given))) as error:
        getattr(Speculator(tiny()), call)([1, 2], **({"max_new_tokens": 4} | given))
    assert refused(error)


@pytest.mark.parametrize("temperature", [1e38, 1e-300])
def test_the_extremes_of_temperature_are_laws(temperature: float) -> None:
    settings = {"do_sample": True, "temperature": temperature, "suppress_tokens": [5]}
    out = Speculator(tiny(), NGram()).generate(PROMPTS, max_new_tokens=6, **settings)
    assert temperature > 1 or out.token_ids == plain(tiny(), PROMPTS, 6)


def test_no_stop_strings_are_none() -> None:
    for none in (None, (), [], ""):
        out = Speculator(tiny()).generate(PROMPTS[0], max_new_tokens=4, stop_strings=none)
        assert out.token_ids == plain(tiny(), PROMPTS[:1], 4)


LISTS = ["suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"]


@pytest.mark.parametrize("make", [tuple, torch.tensor, np.array])
@pytest.mark.parametrize("name", LISTS)
def test_ids_in_a_list_of_another_kind(name: str, make: Any) -> None:
    spec, ids = Speculator(tiny(), NGram()), list(range(5, 200))
    expected = spec.generate(PROMPTS, max_new_tokens=6, **{name: ids}).token_ids
    assert expected != plain(tiny(), PROMPTS, 6)
    assert spec.generate(PROMPTS, max_new_tokens=6, **{name: make(ids)}).token_ids == expected


@pytest.mark.parametrize("none", [[], (), torch.tensor([])], ids=repr)
def test_no_ids_suppress_nothing(none: Any) -> None:
    for name in LISTS[:2]:
        out = Speculator(tiny(), NGram()).generate(PROMPTS, max_new_tokens=6, **{name: none})
        assert out.token_ids == plain(tiny(), PROMPTS, 6)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (torch.tensor(3), "shape"),
        (torch.ones(1, 2, 3, dtype=torch.long), "shape"),
        ([torch.ones(2, 2, dtype=torch.long)], "shape"),
        ([torch.tensor(3)], "shape"),
        (torch.tensor([True, False]), "bool"),
        (torch.tensor([1.0]), "float"),
        ([True, False], "prompt"),
        (user(None), "content"),
        (user([]), "content"),
        (user(["x"]), "content"),
        (user([{"type": "image", "url": "x"}]), "content"),
        (user(5), "content"),
        ([{"role": 3, "content": "x"}], "role"),
        ([{"content": "x"}], "role"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_prompts_that_are_none(prompt: Any, word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        Speculator(tiny()).generate(prompt, max_new_tokens=2)
    assert refused(error)


def test_messages_in_text_parts() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    spec = Speculator(tiny())
    got = spec.generate(user(parts), max_new_tokens=4).token_ids
    assert got == spec.generate("abc", max_new_tokens=4).token_ids


def test_a_conversation_that_the_template_refuses() -> None:
    target = TargetModel.load(random=TARGETS["llama"], dtype="float32", device="cpu")
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate") as error:
        Speculator(target).generate("x", max_new_tokens=2)
    assert refused(error)


# -- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"drafter": "ngram"}, "widen"),
        ({"drafter": "none"}, "widen"),
        ({"drafter": NGram()}, "widen"),
        ({}, "widen"),
        ({"widen": 1}, "widen"),
        ({"widen": False, "allow_other_target": "yes"}, "allow_other_target"),
        ({"widen": False, "drafter": 5}, "drafter"),
        ({"widen": False, "tokenizer": object()}, "tokenizer"),
        ({"widen": False, "gguf_file": "x"}, "gguf_file"),
        ({"widen": False, "target": 5}, "target"),
        ({"widen": False, "target": "x", "gguf": "x"}, "gguf"),
        ({"widen": False, "target": "x", "tokenizer": object()}, "tokenizer"),
        ({"widen": False, "target": "x", "revision": 3}, "revision"),
        ({"widen": False, "target": "x", "dtype": 3}, "dtype"),
        ({"widen": False, "target": "x", "device": 1.5}, "device"),
        ({"widen": False, "heads": 5}, "heads"),
    ],
)
def test_arguments_of_loading(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        Speculator.from_pretrained(**({"target": tiny(), "widen": True} | arguments))
    assert refused(error)


def test_widen_with_heads(folder: Path) -> None:
    for drafter in (None, "heads"):
        spec = Speculator.from_pretrained(folder, target=tiny(), drafter=drafter, widen=True)
        assert spec.generate(PROMPTS, max_new_tokens=8).token_ids == plain(tiny(), PROMPTS, 8)
    with pytest.raises(InputError, match="widen"):
        Speculator.from_pretrained(folder, target=tiny(), drafter="none", widen=True)


@pytest.mark.parametrize("random", [5, ["llama"], "llama"])
def test_fields_of_a_random_target(random: Any) -> None:
    with pytest.raises(InputError, match="random") as error:
        TargetModel.load(random=random)
    assert refused(error)


def test_a_target_by_path_and_dtype(tmp_path: Path) -> None:
    stock(TARGETS["llama"]).save_pretrained(tmp_path)
    tiny().tokenizer.save_pretrained(tmp_path)
    spec = Speculator.from_pretrained(
        target=tmp_path, drafter=tmp_path, dtype=torch.float32, device=torch.device("cpu")
    )
    assert spec.drafter.name == "draft_model"
    assert spec.generate(PROMPTS, max_new_tokens=6).token_ids == plain(tiny(), PROMPTS, 6)


# -- a call --------------------------------------------------------------------------------------


def test_a_record_of_other_taps_than_the_drafters() -> None:
    head = make_head("medusa", tiny().spec, taps=[1])
    for drafter in (head, Merged([NGram(), head])):
        with pytest.raises(InputError, match="taps") as error:
            Speculator(tiny(), drafter).generate(
                PROMPTS, max_new_tokens=4, record=Recorder([], "float32")
            )
        assert refused(error)


class Bad(LogitsProcessor):
    """Leaves no token after a prefix of 40 tokens or more."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= 40 else scores


@pytest.mark.parametrize("drafter", [Plain(), NGram()])
@pytest.mark.parametrize("first", [40, 38])
def test_the_row_that_is_named_is_the_callers(first: int, drafter: Any) -> None:
    """Rows are read in order of length, those that end make room for others."""
    prompts = [[1, 2], list(range(first)), [3]]
    settings = {"do_sample": True, "logits_processor": [Bad()], "batch_size": 2}
    for numbers, row in ((prompts, 1), (prompts[::-1], 1), ([prompts[1], *prompts], 0)):
        with pytest.raises(InputError, match=f"row {row} "):
            Speculator(tiny(), drafter).generate(numbers, max_new_tokens=4, **settings)


def test_forwards_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK", 64)
    target = TargetModel.load(random=TARGETS["llama"], dtype="float32", device="cpu")
    calls, inner = [], target.forward

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return inner(*arguments)

    target.forward = counted  # type: ignore[method-assign]
    prompts = [[1], list(range(200)), [2, 3]]
    out = Speculator(target, NGram(), Plan(3)).generate(prompts, max_new_tokens=6)
    assert out.stats.forwards == len(calls) > 5
