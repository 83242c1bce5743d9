"""Sliding windows: targets of window 16, prompts longer than it, against transformers' generate."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from fixtures import EOS, LLAMA, VOCAB, Scripted, make_head, stock

from selfdraft.heads import HEADS, Plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

WINDOW, TOKENS = 16, 20
WINDOWED: dict[str, dict[str, Any]] = {
    # Every layer slides.
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": WINDOW},
    # Two layers slide and one does not, each kind with a rotary base of its own; both softcaps.
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 20.0,
    },
}
# (drafter, plan, side): a head kind with its draft length or tree, or a script of right tokens, as
# a chain or as a tree in which every right token is the second child.
DRAFTS = [
    *((kind, 4, False) for kind in sorted(HEADS)),
    *((kind, Plan(4, nodes=9), False) for kind in sorted(HEADS)),
    ("hydra", 1, False),
    ("script", 4, False),
    ("script", 4, True),
]


def prompts() -> list[list[int]]:
    """Shorter than the window, just as long, one longer, and three times as long."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, WINDOW, 17, 50)]


@cache
def setup(name: str) -> tuple[TargetModel, list[list[int]]]:
    """The target, and what transformers' own generate writes."""
    model = stock(WINDOWED[name])
    answers = []
    for ids in prompts():
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS,
            do_sample=False, pad_token_id=EOS,
        )  # fmt: skip
        answers.append(out[0, len(ids) :].tolist())
    return TargetModel(model, pack=True), answers


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(("drafter", "plan", "side"), DRAFTS)
def test_greedy_past_the_window_is_transformers(
    name: str, drafter: str, plan: Plan | int, side: bool
) -> None:
    target, answers = setup(name)
    if drafter == "script":
        known = list(zip(prompts(), answers, strict=True))
        drafts: Any = Scripted(known, max_depth=4, pattern=[3, 0, 4, 1], side=side)
    else:
        drafts = make_head(drafter, target.spec, depth=4, scale=0.02)
    out = Speculator(target, drafts, plan=plan).generate(prompts(), max_new_tokens=TOKENS)
    assert out.token_ids == answers
    assert drafter != "script" or out.stats.tokens_per_round > 2


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_is_felt(name: str) -> None:
    """The same weights without a window write something else, so the test above can fail."""
    _, answers = setup(name)
    assert all(0 <= token < VOCAB for ids in answers for token in ids)
    wide = TargetModel(stock(WINDOWED[name] | {"sliding_window": 200}))
    out = Speculator(wide).generate(prompts(), max_new_tokens=TOKENS)
    assert out.token_ids[0][:8] == answers[0][:8]  # the window is not full before
    assert out.token_ids[3] != answers[3]
