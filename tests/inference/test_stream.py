"""Text that is shown as it comes: whole characters, spaces kept, no token decoded over and over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import LLAMA, PROMPTS, VOCAB, script, stock, tiny
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from selfdraft.heads import InputError
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

TEXT = "aé€😀 b\u00e9ä"


class Forcing(LogitsProcessor):
    """Leaves the next id of an answer to a prompt of one token."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.answer[min(input_ids.shape[1], len(self.answer)) - 1]] = 0
        return forced


def test_characters_come_whole_and_one_by_one() -> None:
    ids = tiny().tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)
    settings: dict[str, Any] = {"logits_processor": [Forcing(ids)], "max_new_tokens": len(ids)}
    assert list(Speculator(tiny()).stream([1], **settings)) == list(TEXT)


def test_an_incomplete_character_at_the_end_is_shown() -> None:
    ids = tiny().tokenizer(TEXT)["input_ids"][:-1]
    settings: dict[str, Any] = {"logits_processor": [Forcing(ids)], "max_new_tokens": len(ids)}
    assert "".join(Speculator(tiny()).stream([1], **settings)) == TEXT[:-1] + "\ufffd"


@pytest.fixture
def spaced() -> TargetModel:
    """Tokens are words behind a space, which is stripped from the first of a text."""
    words = Tokenizer(models.WordLevel({f"▁w{i}": i for i in range(VOCAB)}, unk_token="▁w0"))
    words.decoder = decoders.Metaspace()
    return TargetModel(stock(LLAMA), PreTrainedTokenizerFast(tokenizer_object=words))


def test_spaces_between_pieces_stay(spaced: TargetModel) -> None:
    spec = Speculator(spaced)
    pieces = list(spec.stream(PROMPTS[0], max_new_tokens=12))
    assert len(pieces) == 12
    assert "".join(pieces) == spec.generate(PROMPTS[0], max_new_tokens=12).texts[0]
    assert "".join(pieces).count(" ") == 11


def test_a_piece_costs_the_same_however_long_the_text_is(
    spaced: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of at most 3 tokens are decoded for each piece."""
    lengths, decode = [], spaced.tokenizer.decode

    def counted(ids: list[int], **settings: Any) -> str:
        lengths.append(len(ids))
        return decode(ids, **settings)

    monkeypatch.setattr(spaced.tokenizer, "decode", counted)
    spec = Speculator(spaced, script(tiny(), max_depth=2))
    assert len(list(spec.stream(PROMPTS[0], max_new_tokens=39))) < 20
    assert max(lengths) <= 6


@pytest.mark.parametrize("name", ["batch_size", "num_return_sequences", "record"])
def test_what_generate_alone_takes_is_not_advised(name: str) -> None:
    with pytest.raises(InputError, match=f"does not take '{name}'") as error:
        Speculator(tiny()).stream("hi", **{name: 2})
    advice = str(error.value).splitlines()[1]
    assert name not in advice and "stats" in advice
