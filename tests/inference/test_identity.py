"""Hashes of a target's weights: taken once, when they are asked for, of the weights as loaded."""

from typing import Any

import pytest
import torch
from fixtures import LLAMA, PROMPTS, stock, tiny

from selfdraft.inference import loading
from selfdraft.inference.draft_model import DraftModel
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hashes each pass over the weights has taken."""
    tiny()  # whose own are not counted
    kinds, digest = [], loading._digest

    def counted(weights: Any, *dtypes: Any) -> list[str]:
        kinds.append(len(dtypes))
        return digest(weights, *dtypes)

    monkeypatch.setattr(loading, "_digest", counted)
    return kinds


def test_bfloat16_weights_are_hashed_once(hashed: list[int]) -> None:
    half = loading.fingerprints(stock(LLAMA, dtype=torch.bfloat16))
    full = loading.fingerprints(stock(LLAMA))
    assert half["fingerprint"] == half["fingerprint_bf16"] == full["fingerprint_bf16"]
    assert hashed == [1, 2]


def test_generation_without_heads_takes_no_hash(hashed: list[int]) -> None:
    target, draft = (TargetModel(stock(LLAMA, seed), tiny().tokenizer) for seed in (0, 1))
    for drafter in (None, DraftModel(draft, target)):
        Speculator(target, drafter).generate(PROMPTS, max_new_tokens=4)
    assert hashed == []
    assert target.spec.identity["fingerprint"] == tiny().spec.identity["fingerprint"]
    assert target.spec.identity == target.spec.identity
    assert hashed == [2]


def test_packed_weights_are_hashed_as_they_were(hashed: list[int]) -> None:
    target = TargetModel(stock(LLAMA), pack=True)
    assert hashed == [2] * bool(target.packed)
    assert target.spec.identity["fingerprint"] == tiny().spec.identity["fingerprint"]
