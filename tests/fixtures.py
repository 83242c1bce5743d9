"""Tiny targets, random heads and scripted drafters that the tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from selfdraft.heads import HEADS, Draft, Head, Plan, TargetSpec
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

VOCAB, EOS = 320, 258
_SIZES = {"vocab_size": VOCAB, "eos_token_id": EOS, "initializer_range": 0.2}
LLAMA = _SIZES | {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 16},
    "gemma2": LLAMA
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 16,
        "final_logit_softcapping": 5.0,
    },
    "granite": LLAMA
    | {"model_type": "granite", "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "gpt2": _SIZES
    | {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    | {"bos_token_id": EOS, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5},
}
CLOSE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
}
PROMPTS = [[1, 5, 9], list(range(20, 37)), [7] * 9, list(range(100, 130))]
MICRO = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.45,
    "eos_token_id": 2,
}


@cache
def tiny(name: str = "llama") -> TargetModel:
    """A float32 target of `TARGETS` as `TargetModel.load` gives it, shared: leave it as it is."""
    return TargetModel.load(random=TARGETS[name], dtype="float32", device="cpu")


def stock(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a config, with the weights that `TargetModel.load` gives it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**fields), dtype=torch.float32
        )
    return model.to(dtype).eval()


def double(name: str = "llama", **fields: Any) -> TargetModel:
    """A float64 target around a model object."""
    model = stock(TARGETS[name] | fields, dtype=torch.float64)
    return TargetModel(model, tiny(name).tokenizer)


def precise(name: str) -> TargetModel:
    """In float64 where the family computes in it; Gemma 2's softmax is taken in float32."""
    return tiny(name) if name == "gemma2" else double(name)


def micro(vocab: int, seed: int = 0) -> TargetModel:
    """A float64 target whose laws can be enumerated."""
    return TargetModel(stock(MICRO | {"vocab_size": vocab}, seed, torch.float64))


def make_head(
    kind: str,
    spec: TargetSpec,
    *,
    depth: int = 3,
    scale: float = 0.3,
    draft_ids: list[int] | None = None,
    seed: int = 0,
    **fields: Any,
) -> Head:
    """A head with random weights, in the target's dtype; `scale` 0 leaves it as it starts."""
    config = HEADS[kind].Config(kind=kind, depth=depth, **fields)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = HEADS[kind](config, spec, ids).to(spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters() if scale else []:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(scale * noise)
    return head.eval()


def batch_of(lengths: list[int], prompt: int = 3, seed: int = 0, vocab: int = VOCAB) -> dict:
    """Right-padded random ids; all but the first `prompt` tokens of a row count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (len(lengths), max(lengths)), generator=generator)
    place = torch.arange(max(lengths))
    length = torch.tensor(lengths)
    mask = (place >= prompt) & (place < length[:, None])
    return {"ids": ids, "loss_mask": mask, "length": length}


def plain(target: TargetModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Plain greedy ids, one prompt at a time."""
    speculator = Speculator(target)
    return [speculator.generate(ids, max_new_tokens=tokens).token_ids[0] for ids in prompts]


@dataclass
class ScriptState:
    """For each row: the answer it follows, how far it is, and its round."""

    rows: list[tuple[list[int], int, int]]

    def select(self, rows: Tensor) -> ScriptState:
        return ScriptState([self.rows[row] for row in rows.tolist()])


@dataclass
class Scripted:
    """Drafts from known answers: right tokens first, wrong ones behind.

    Attributes:
        answers: prompt and its greedy continuation, in any order.
        pattern: right tokens of the draft in round r is pattern[r % len]; None: all of them.
        side: a tree in which each right token is the second child, behind a wrong one.
    """

    answers: list[tuple[list[int], list[int]]]
    max_depth: int = 4
    pattern: list[int] | None = None
    side: bool = False
    name: str = "scripted"
    taps: list[int] = field(default_factory=list)

    def start(self, ids_BT: Tensor, length_B: Tensor, features: dict) -> ScriptState:
        known = {tuple(prompt): answer for prompt, answer in self.answers}
        prompts = [ids[:n] for ids, n in zip(ids_BT.tolist(), length_B.tolist(), strict=True)]
        return ScriptState([(known[tuple(prompt)], 1, 0) for prompt in prompts])

    def propose(
        self, state: ScriptState, root_B: Tensor, plan: Plan, sampling: Any, noise: Any
    ) -> Draft:
        depth = min(plan.depth, self.max_depth)
        drafts = []
        for answer, place, turn in state.rows:
            right = depth if self.pattern is None else self.pattern[turn % len(self.pattern)]
            follow = answer[place : place + depth] + [0] * (place + depth - len(answer))
            drafts.append([t if i < right else (t + 1) % 5 for i, t in enumerate(follow[:depth])])
        if not self.side:
            return Draft.chain(torch.cat([root_B[:, None], torch.tensor(drafts).long()], 1))
        ids = [[root] for root in root_B.tolist()]
        parents = [-1]
        for level in range(depth):
            parents += [2 * level] * 2  # the second child of each level is node 2*level + 2
            for row, draft in zip(ids, drafts, strict=True):
                row += [(draft[level] + 1) % VOCAB, draft[level]]
        shape = (len(ids), len(parents))
        return Draft(
            torch.tensor(ids),
            torch.tensor(parents).expand(shape),
            torch.zeros(shape, dtype=torch.bool),
            torch.ones(shape, dtype=torch.bool),
        )

    def advance(
        self, state: ScriptState, committed_BM: Tensor, count_B: Tensor, features: dict
    ) -> ScriptState:
        counts = count_B.tolist()
        return ScriptState(
            [
                (answer, place + n, turn + 1)
                for (answer, place, turn), n in zip(state.rows, counts, strict=True)
            ]
        )


def spoiled_head(kind: str, spec: TargetSpec, value: float) -> Head:
    """A head whose logits are one value everywhere: NaN, infinity or a constant."""
    head = make_head(kind, spec)

    def logits(hidden: Tensor, paths: Tensor) -> Tensor:
        return hidden.new_full((*hidden.shape[:-1], spec.vocab_size), value)

    head.draft_logits = logits  # type: ignore[method-assign]
    return head


def script(target: TargetModel, tokens: int = 40, **fields: Any) -> Scripted:
    """A drafter that knows the greedy answers to `PROMPTS`."""
    return Scripted(list(zip(PROMPTS, plain(target, PROMPTS, tokens), strict=True)), **fields)
