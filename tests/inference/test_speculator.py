"""The public surface: what goes in, what comes out, transformers' own generate, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import EOS, PROMPTS, TARGETS, make_head, plain, stock, tiny
from transformers import StoppingCriteria

import selfdraft
from selfdraft.heads import InputError, Plan, save_head
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.statistics import Stats


@pytest.fixture(scope="module")
def spec() -> Speculator:
    return Speculator(tiny(), make_head("hydra", tiny().spec, scale=0.02))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tmp_path, make_head("hydra", tiny().spec, depth=2, scale=0.02, draft_ids=[3, 5, 9]))
    return tmp_path


# -- prompts -------------------------------------------------------------------------------------


def test_every_form_of_a_prompt(spec: Speculator) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = spec.target.chat_ids(messages)
    expected = spec.generate(ids, max_new_tokens=8).token_ids
    assert expected == plain(spec.target, [ids], 8)
    for prompt in ("hello", messages, ids, torch.tensor(ids)):
        assert spec.generate(prompt, max_new_tokens=8).token_ids == expected
    many = ["hello", messages, ids, torch.tensor(ids)]
    assert spec.generate(many, max_new_tokens=8).token_ids == expected * 4
    assert spec.generate(torch.tensor([ids, ids]), max_new_tokens=8).token_ids == expected * 2
    raw = spec.target.tokenizer("hello")["input_ids"]
    assert spec.generate("hello", chat=False, max_new_tokens=8).token_ids == plain(
        spec.target, [raw], 8
    )


def test_result_is_new_tokens_alone(spec: Speculator) -> None:
    out = spec.generate(["a", "bc"], max_new_tokens=6, num_return_sequences=2)
    assert len(out.texts) == len(out.token_ids) == len(out.finish_reasons) == 4
    assert [len(ids) for ids in out.token_ids] == [6] * 4
    decode = spec.target.tokenizer.decode
    assert out.texts == [decode(ids, skip_special_tokens=True) for ids in out.token_ids]
    assert out.stats.tokens == 24


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 5}, {"stop_strings": ["e"]}])
@pytest.mark.parametrize("prompt", ["one", "two", "drei"])
def test_stream_is_generate(prompt: str, settings: dict, spec: Speculator) -> None:
    """The bytes that a random target writes are mostly no UTF-8: pieces must still add up."""
    stats = Stats()
    pieces = list(spec.stream(prompt, max_new_tokens=40, stats=stats, **settings))
    out = spec.generate(prompt, max_new_tokens=40, **settings)
    assert "".join(pieces) == out.texts[0]
    assert stats.tokens == out.stats.tokens
    assert len(pieces) > 1 or len(out.token_ids[0]) < 3


def test_package_hands_on_the_speculator() -> None:
    assert selfdraft.Speculator is Speculator


# -- transformers' own generate ------------------------------------------------------------------


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[EOS] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


class AtLength(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 41)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "left-padded"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": list(range(40))},
        {"eos_token_id": list(range(60))},
        {"bad_words_ids": [[7], [8, 9]], "forced_eos_token_id": 5},
        {"stopping_criteria": [AtLength()]},
        {"suppress_tokens": [], "begin_suppress_tokens": [7]},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_custom_generate_is_generate(prompts: list, settings: dict[str, Any]) -> None:
    model = stock(TARGETS["llama"])
    spec = Speculator.from_pretrained(target=model, drafter="none")
    spec = Speculator(spec.target, make_head("hydra", spec.target.spec, scale=0.02))
    arguments = padded(prompts) | {"max_new_tokens": 24, "do_sample": False, "pad_token_id": EOS}
    theirs = model.generate(**arguments, **settings)
    ours = model.generate(**arguments, **settings, custom_generate=spec)
    assert ours.tolist() == theirs.tolist()


def test_custom_generate_samples_by_the_callers_seed() -> None:
    model = stock(TARGETS["llama"])
    spec = Speculator.from_pretrained(target=model)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        arguments = padded(PROMPTS) | {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
        runs.append(model.generate(**arguments, pad_token_id=EOS, custom_generate=spec).tolist())
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"return_dict_in_generate": True}, {"num_return_sequences": 2}],
    ids=str,
)
def test_custom_generate_refuses_or_honours(settings: dict[str, Any]) -> None:
    """What cannot be given is refused by name; it is never left out in silence."""
    model = stock(TARGETS["llama"])
    spec = Speculator.from_pretrained(target=model)
    arguments = padded(PROMPTS[:1]) | {"max_new_tokens": 4, "pad_token_id": EOS} | settings
    if "num_return_sequences" in settings:
        arguments["do_sample"] = True
        assert len(model.generate(**arguments, custom_generate=spec)) == 2
    else:
        with pytest.raises(InputError, match=next(iter(settings))):
            model.generate(**arguments, custom_generate=spec)


def test_custom_generate_refuses_a_prompt_without_room() -> None:
    model = stock(TARGETS["llama"] | {"max_position_embeddings": 16})
    spec = Speculator.from_pretrained(target=model)
    with pytest.raises(InputError, match="positions"):
        model.generate(**padded([[5] * 20]), max_new_tokens=4, custom_generate=spec)


# -- loading -------------------------------------------------------------------------------------


def test_from_pretrained_of_heads_that_name_a_random_target(folder: Path) -> None:
    spec = Speculator.from_pretrained(folder, device="cpu")
    assert spec.target.spec.identity == tiny().spec.identity
    assert spec.drafter.name == "hydra+ngram"
    alone = Speculator.from_pretrained(folder, drafter="heads", target=tiny())
    assert (alone.drafter.name, alone.plan.depth) == ("hydra", 2)
    out = spec.generate(PROMPTS, max_new_tokens=12)
    assert out.token_ids == plain(tiny(), PROMPTS, 12)
    assert out.stats.drafted_by_depth
    assert Speculator.from_pretrained(str(folder), plan=1, target=tiny()).plan == Plan(1)
    none = Speculator.from_pretrained(folder, drafter="none", target=tiny())
    assert none.generate(PROMPTS, max_new_tokens=12).stats.drafted_by_depth == []


def test_from_pretrained_with_a_loaded_model(folder: Path) -> None:
    model = stock(TARGETS["llama"])
    spec = Speculator.from_pretrained(folder, target=model, tokenizer=tiny().tokenizer)
    assert spec.target.model is model
    assert spec.generate(PROMPTS[0], max_new_tokens=8).token_ids == plain(tiny(), PROMPTS[:1], 8)
    assert spec.generate("hi", max_new_tokens=8).texts[0]


def test_from_pretrained_of_a_saved_target(folder: Path, tmp_path: Path) -> None:
    stock(TARGETS["llama"]).save_pretrained(tmp_path / "target")
    tiny().tokenizer.save_pretrained(tmp_path / "target")
    spec = Speculator.from_pretrained(folder, target=str(tmp_path / "target"), device="cpu")
    assert (
        spec.generate("hi", max_new_tokens=8).token_ids
        == Speculator(tiny()).generate("hi", max_new_tokens=8).token_ids
    )


# -- bad input -----------------------------------------------------------------------------------


def two_lines(error: pytest.ExceptionInfo[ValueError]) -> bool:
    return isinstance(error.value, InputError) and len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([], "empty"),
        ([[]], "no tokens"),
        ([[1, 2], []], "prompt 1"),
        ("", "no tokens"),
        (["hi", " "], "prompt 1 is empty"),
        ([1, 320], "320"),
        ([-1], "-1"),
        ([0.5, 1.0], "float"),
        (None, "NoneType"),
        (7, "int"),
        (["x", 7], "int"),
        ([{"role": "user"}], "content"),
        ([1] * 256, "256 positions"),
        ([1] * 300, "300 tokens"),
        (torch.tensor([], dtype=torch.long), "no tokens"),
        (torch.tensor([0.5]), "float"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_prompts(prompt: Any, word: str, spec: Speculator) -> None:
    with pytest.raises(ValueError, match=word) as error:
        spec.generate(prompt, max_new_tokens=4)
    assert two_lines(error)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 2.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "warm"},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"num_return_sequences": 0},
        {"batch_size": 0},
        {"num_return_sequences": 2.0},
        {"batch_size": None},
        {"batch_size": True},
        {"stop_strings": [""]},
        {"seed": [1, 2]},
        {"seed": None},
        {"seed": 1.5},
        {"temprature": 0.5},
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], spec: Speculator) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))) as error:
        spec.generate([1, 2], **({"max_new_tokens": 4} | settings))
    assert two_lines(error)


def test_the_nearest_name_is_told(spec: Speculator) -> None:
    with pytest.raises(InputError, match="Did you mean 'temperature'"):
        spec.generate([1], temprature=1.0)


def test_text_without_a_tokenizer() -> None:
    bare = Speculator.from_pretrained(target=stock(TARGETS["llama"]))
    assert bare.generate([1, 2], max_new_tokens=3).texts == [""]
    for call in (
        lambda: bare.generate("text"),
        lambda: bare.generate([{"role": "user", "content": "x"}]),
        lambda: bare.generate([1, 2], stop_strings=["x"]),
        lambda: bare.stream([1, 2]),
    ):
        with pytest.raises(InputError, match="tokenizer") as error:
            call()
        assert two_lines(error)


def test_stream_takes_one_prompt(spec: Speculator) -> None:
    with pytest.raises(InputError, match="one prompt"):
        spec.stream(["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "neither heads nor a target"),
        ({"drafter": "heads", "target": "x"}, "needs a heads folder"),
        ({"drafter": "hedas", "target": "x"}, "heads"),
        ({"heads": "/no/such/folder"}, "head.json"),
        ({"heads": "nobody/nothing"}, "nobody/nothing"),
        ({"target": "/no/such/model"}, "/no/such/model"),
    ],
    ids=str,
)
def test_bad_names(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        Speculator.from_pretrained(**arguments)
    assert two_lines(error)


def test_bad_plan_and_bad_pairs(folder: Path) -> None:
    with pytest.raises(InputError, match="plan"):
        Speculator.from_pretrained(folder, target=tiny(), plan=-1)
    with pytest.raises(InputError, match="loaded model"):
        Speculator.from_pretrained(folder, target=stock(TARGETS["llama"]), dtype="float32")
    with pytest.raises(InputError, match="model_type"):
        Speculator.from_pretrained(folder, target=tiny("qwen3"))
