"""transformers' own generate with a Speculator as its loop: the same form, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fixtures import EOS, PROMPTS, TARGETS, stock, tiny
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from selfdraft.heads import InputError
from selfdraft.inference.speculator import Speculator


def left(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[EOS] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("pad", [None, 0, 7])
@pytest.mark.parametrize("eos", [list(range(9, 70)), 169])
def test_custom_generate_pads_as_generate(pad: int | None, eos: Any) -> None:
    model = stock(TARGETS["llama"])
    model.generation_config.eos_token_id = eos
    spec = Speculator.from_pretrained(target=model, drafter="ngram")
    arguments = left(PROMPTS) | {"max_new_tokens": 24, "do_sample": False, "pad_token_id": pad}
    theirs = model.generate(**arguments)
    assert model.generate(**arguments, custom_generate=spec).tolist() == theirs.tolist()


def test_custom_generate_on_another_model() -> None:
    model, other = stock(TARGETS["llama"]), stock(TARGETS["llama"], seed=5)
    spec = Speculator.from_pretrained(target=model, drafter="ngram")
    with pytest.raises(InputError, match=r"target.*\n"):
        other.generate(**left(PROMPTS), max_new_tokens=4, pad_token_id=0, custom_generate=spec)


def filled() -> DynamicCache:
    cache, states = DynamicCache(), torch.zeros(1, 2, 3, 16)
    cache.update(states, states, 0)
    return cache


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 64)}),
        ("token_type_ids", {"token_type_ids": torch.zeros(1, 3, dtype=torch.long)}),
        ("cache|past_key_values", {"past_key_values": filled()}),
    ],
)
def test_custom_generate_refuses_what_it_would_not_read(name: str, given: dict[str, Any]) -> None:
    model = stock(TARGETS["gpt2"])
    spec = Speculator.from_pretrained(target=model)
    arguments = left(PROMPTS[:1]) | {"max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(InputError, match=rf"{name}.*\n"):
        model.generate(**arguments, **given, custom_generate=spec)


def test_custom_generate_takes_what_carries_no_input() -> None:
    model = stock(TARGETS["llama"])
    spec = Speculator.from_pretrained(target=model)
    arguments = left(PROMPTS) | {"max_new_tokens": 6, "do_sample": False, "pad_token_id": EOS}
    theirs = model.generate(**arguments)
    harmless = {"output_attentions": True, "past_key_values": DynamicCache(), "logits_to_keep": 1}
    assert model.generate(**arguments, **harmless, custom_generate=spec).equal(theirs)


def test_a_call_by_hand_refuses_a_length_that_leaves_no_token() -> None:
    config = GenerationConfig(max_length=2, do_sample=False)
    spec, ids = Speculator(tiny()), torch.tensor([[1, 2]])
    with pytest.raises(InputError, match="max_length 2 leaves no token after 2 of prompt"):
        spec(tiny().model, ids, generation_config=config)


def test_a_call_by_hand_refuses_images_by_name() -> None:
    spec = Speculator(tiny())
    config = GenerationConfig(max_length=3, do_sample=False)
    call = partial(spec, tiny().model, torch.tensor([[1]]), generation_config=config)
    for name, value in (("pixel_values", [0]), ("mm_token_type_ids", torch.ones(1, 1))):
        with pytest.raises(InputError, match=name):
            call(**{name: value})
    assert len(call(mm_token_type_ids=torch.zeros(1, 1))) == 1  # what a processor says of text
