"""Heads with a cache train on the states that drafting has, and it holds nothing but the truth:
MTP, EAGLE, and the others behind prefix attention.

A batch of ragged rows is decoded in rounds: chains and trees of random tokens, of which each row
accepts another number.  Every state is compared with `unroll` on the text that has those tokens,
every cache with one that is made anew from the true tokens.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fixtures import LLAMA, VOCAB, make_head, stock, tiny
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from selfdraft.heads import Head, load_head, save_head
from selfdraft.heads.prefix import PrefixFeatures
from selfdraft.heads.sequence import Memory
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

DEPTH, TIME = 4, 27
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
TARGETS: dict[str, dict[str, Any]] = {
    "plain": LLAMA,
    "head_dim": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "partial": LLAMA | {"model_type": "stablelm", "partial_rotary_factor": 0.25},
    "llama3": LLAMA | {"rope_parameters": LLAMA3},
    "yarn": LLAMA | {"rope_parameters": YARN | {"original_max_position_embeddings": 64}},
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("mtp", {}),
    ("mtp", {"norm_stage": "post", "recycle": "normed", "concat": "hidden_first", "taps": [1]}),
    ("mtp", {"modules": "depth"}),
    ("mtp", {"modules": "depth", "recycle": "normed", "taps": [0, 1]}),
    ("eagle", {}),
    ("eagle", {"fusion": "fc", "tap_norm": False, "norm_before_residual": True}),
    ("eagle", {"taps": [], "norm_stage": "post", "recycle": "normed"}),
    ("hydra", {"prefix_attention": True, "taps": [1]}),
    ("medusa", {"prefix_attention": True}),
]
PREFIX = {"prefix_attention": True}
CASES = [("plain", kind, fields) for kind, fields in KINDS] + [
    (name, kind, fields)
    for name in list(TARGETS)[1:]
    for kind, fields in [
        ("mtp", {}),
        ("mtp", {"modules": "depth"}),
        ("eagle", {}),
        ("hydra", PREFIX),
    ]
]


def head_of(name: str, kind: str, fields: dict[str, Any]) -> Head:
    target = TargetModel(stock(TARGETS[name], dtype=torch.float64))
    return make_head(kind, target.spec, depth=DEPTH, **fields)


class Rounds:
    """Rows of random tokens and target states, read in rounds of unlike counts."""

    def __init__(self, head: Head, lengths: list[int], seed: int = 0) -> None:
        self.head, self.dice = head, torch.Generator().manual_seed(seed)
        rows, width = len(lengths), head.spec.hidden_size
        self.ids = torch.randint(0, 320, (rows, TIME), generator=self.dice)
        shapes = {"hidden": (rows, TIME, width), "taps": (rows, TIME, len(head.taps), width)}
        self.features = {
            name: torch.randn(shape, generator=self.dice, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self.length = torch.tensor(lengths)
        self.state = self.fresh()

    def fresh(self) -> Memory | PrefixFeatures:
        width = int(self.length.max())
        features = {name: value[:, :width] for name, value in self.features.items()}
        return self.head.start(self.ids[:, : width + 1], self.length, features)

    def part(self, first: Tensor, width: int, source: Tensor) -> Tensor:
        """`width` entries of each row from its `first` on, padded with entry 0."""
        place = first[:, None] + torch.arange(width)
        place = torch.where(place < TIME, place, 0)
        return source[torch.arange(len(first))[:, None], place]

    def play(self) -> Iterator[None]:
        """Until a row ends: draft, compare and advance by what the caller does in between."""
        while int(self.length.max()) < TIME - DEPTH - 1:
            yield
            count = torch.randint(1, DEPTH + 2, self.length.shape, generator=self.dice)
            width = int(count.max())
            states = {n: self.part(self.length, width, f) for n, f in self.features.items()}
            tokens = self.part(self.length + 1, width, self.ids)
            self.state = self.head.advance(self.state, tokens, count, states)
            self.length = self.length + count

    def trained(self, drafts_BK: Tensor) -> list[Tensor]:
        """States of slots 1..DEPTH in training, on the text that goes on with the drafts."""
        ids, rows = self.ids.clone(), torch.arange(len(self.ids))
        for k in range(drafts_BK.shape[1]):
            ids[rows, self.length + 1 + k] = drafts_BK[:, k]
        at = [rows * TIME + self.length - 1] * DEPTH
        return self.head.unroll({"ids": ids}, self.features, at)

    def draft(self, *shape: int) -> Tensor:
        return torch.randint(0, 320, (len(self.ids), *shape), generator=self.dice)

    def root(self) -> Tensor:
        return self.part(self.length, 1, self.ids)[:, 0]


def agree(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def compare_memories(got: Memory | PrefixFeatures, expected: Memory | PrefixFeatures) -> None:
    if isinstance(got, PrefixFeatures):
        got, expected = (
            Memory([m.cache], [m.hidden_BW], got.cache.length_B) for m in (got, expected)
        )
    for out, wanted in zip(got.outs, expected.outs, strict=True):
        agree(out, wanted)
    for cache, fresh in zip(got.caches, expected.caches, strict=True):
        assert cache.length_B.equal(fresh.length_B)
        for row, length in enumerate(cache.length_B.tolist()):
            for mine, true in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
                committed = slice(cache.room + cache.first, cache.room + length)
                again = slice(fresh.room + cache.first, fresh.room + length)
                agree(mine[row, :, committed], true[row, :, again])


@pytest.mark.parametrize(("name", "kind", "fields"), CASES)
@torch.no_grad()
def test_drafting_has_the_states_of_training(name: str, kind: str, fields: dict) -> None:
    rounds, turns = Rounds(head_of(name, kind, fields), [1, 7, 3]), 0
    head = rounds.head
    for _ in rounds.play():
        compare_memories(rounds.state, rounds.fresh())
        drafts, memo = rounds.draft(DEPTH - 1), {}
        expected, tokens = rounds.trained(drafts), [rounds.root()]
        for k in range(DEPTH):
            path = torch.stack(tokens, -1)[:, None]
            got = head.step(rounds.state, path, torch.zeros_like(path[..., 0]), memo)
            agree(got[:, 0], expected[k])
            tokens.append(drafts[:, min(k, DEPTH - 2)])
        turns += 1
    assert turns > 1


SHARED = [case for case in CASES if case[2].get("modules") != "depth"]


@pytest.mark.parametrize(("name", "kind", "fields"), SHARED)
@torch.no_grad()
def test_a_tree_has_the_states_of_its_chains(name: str, kind: str, fields: dict) -> None:
    """Two nodes below the root, three below them, one below the last of those; a level a call."""
    rounds = Rounds(head_of(name, kind, fields), [2, 6])
    head, zero = rounds.head, torch.zeros(2, 1, dtype=torch.long)
    for _ in rounds.play():
        ids, root, memo = rounds.draft(6), rounds.root()[:, None], {}
        for places, paths in (
            ([0], [[]]),
            ([0, 0], [[0], [1]]),
            ([0, 0, 1], [[0, 2], [0, 3], [1, 4]]),
            ([2], [[1, 4, 5]]),
        ):
            tokens = torch.stack([torch.cat([root, ids[:, path]], 1) for path in paths], 1)
            got = head.step(rounds.state, tokens, zero + torch.tensor(places), memo)
            for node, path in enumerate(paths):
                agree(got[:, node], rounds.trained(ids[:, path])[len(path)])


@pytest.mark.parametrize(("kind", "fields"), KINDS)
@torch.no_grad()
def test_packed_documents_are_as_if_alone(kind: str, fields: dict) -> None:
    head = head_of("plain", kind, fields)
    rounds = Rounds(head, [5])
    document = (torch.arange(TIME) >= 8).long()[None]
    batch = {"ids": rounds.ids, "document": document}
    together = head.unroll(batch, rounds.features, [torch.tensor([3, 11])] * DEPTH)
    for place, part in ((3, slice(0, 8)), (11, slice(8, TIME))):
        features = {name: value[:, part] for name, value in rounds.features.items()}
        row = torch.tensor([place - part.start])
        alone = head.unroll({"ids": rounds.ids[:, part]}, features, [row] * DEPTH)
        for k in range(DEPTH):
            agree(together[k][int(place == 11)], alone[k][0], 1e-5)  # angles are float32


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_g4_drafting_up_to_the_last_position(kind: str) -> None:
    """G4: the head's rotary positions have no table to run out of."""
    target = TargetModel(stock(LLAMA | {"max_position_embeddings": 32}))
    head, prompts = make_head(kind, target.spec, depth=4), [[1] * 9, [5, 6, 7]]
    expected = Speculator(target).generate(prompts, max_new_tokens=64)
    out = Speculator(target, head).generate(prompts, max_new_tokens=64)
    assert out.token_ids == expected.token_ids
    assert max(len(ids) + len(p) for ids, p in zip(out.token_ids, prompts, strict=True)) >= 32


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_r10_c4_a_folder_holds_the_head_alone(kind: str, fields: dict, tmp_path: Any) -> None:
    """R10, C4: no frozen tensor is saved or wanted, and a tied target leaves no trace."""
    target = tiny("tied")
    head = make_head(kind, target.spec, draft_ids=list(range(0, 320, 3)), **fields)
    frozen = {p.data_ptr() for p in target.model.parameters()}
    assert not frozen & {t.data_ptr() for t in head.state_dict().values()}
    save_head(tmp_path, head)
    again = load_head(tmp_path, target.spec)
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_l5_a_target_whose_sizes_stand_in_its_text_config(kind: str) -> None:
    """L5: a model of images and text, whose layers are a language model's inside it."""
    text = LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"})
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    target = TargetModel(LlavaForConditionalGeneration(config).eval())
    head = make_head(kind, target.spec, scale=0.0)
    head.init_from_target(target.weights)
    assert target.weights.last_layer
    out = Speculator(target, head).generate([[1, 5, 9]], max_new_tokens=6)
    assert out.token_ids == Speculator(target).generate([[1, 5, 9]], max_new_tokens=6).token_ids
