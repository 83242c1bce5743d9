"""A target of few tokens whose states are looked up by prefix: what enumeration runs on.

The decoding loop, the drafters, the verifier and the noise are the real ones; of the target only
the forward is replaced, by a table of random states, and the cache by lists of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from selfdraft.heads import Draft, Plan, TargetSpec

WIDTH = 6
EOS = 0


class TokenCache:
    """What `SlotCache` is to the loop: which tokens each row has read."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.nodes: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def keep(self, paths: list[list[int]]) -> None:
        for row, nodes, path in zip(self.rows, self.nodes, paths, strict=True):
            row += [nodes[node] for node in path]

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class TableTarget:
    """Random context-dependent laws in float64, memoised by prefix.

    Args:
        zeros: share of the logits that are -inf; EOS (token 0) and token 1 never are.
    """

    def __init__(self, vocab: int, seed: int, zeros: float = 0.0) -> None:
        self.vocab, self.seed, self.zeros = vocab, seed, zeros
        self.vocab_size, self.max_positions = vocab, 64
        self.device, self.dtype, self.tokenizer = torch.device("cpu"), torch.float64, None
        self.eos_ids, self.packed = {EOS}, 0
        generator = torch.Generator().manual_seed(seed)
        embedding = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64)
        self._head = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64)
        self._states: dict[tuple[int, ...], Tensor] = {}
        self.spec = TargetSpec(
            hidden_size=WIDTH,
            vocab_size=vocab,
            num_layers=1,
            max_positions=self.max_positions,
            embed=lambda ids: embedding[ids],
            projector=lambda rows, drafting: (
                lambda h: h @ (self._head if rows is None else self._head[rows]).mT
            ),
            identity={},
            device=self.device,
            dtype=self.dtype,
            config=LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=1),
        )

    def state(self, prefix: tuple[int, ...]) -> Tensor:
        """[WIDTH] the state after `prefix`."""
        if prefix not in self._states:
            rng = random.Random(f"{self.seed} {prefix}")
            values = [rng.gauss(0, 1.2) for _ in range(WIDTH)]
            self._states[prefix] = torch.tensor(values, dtype=torch.float64)
        return self._states[prefix]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits with zeros in the support, as the state's own numbers say."""
        logits = hidden @ self._head.T
        if self.zeros:
            coin = (hidden[..., :1] * 7919).frac().abs() + torch.arange(self.vocab) * 0.37
            barred = coin.frac() < self.zeros
            barred[..., :2] = False
            logits = logits.masked_fill(barred, -torch.inf)
        return logits

    def model(self, input_ids: Tensor) -> SimpleNamespace:
        """As a transformers model is called: the logits after the last token."""
        state = self.state(tuple(input_ids[0].tolist()))
        return SimpleNamespace(logits=self.logits(state)[None, None])

    def new_cache(self, rows: int, capacity: int) -> TokenCache:
        return TokenCache(rows)

    def prefill(
        self, ids_BT: Tensor, lengths: list[int], cache: TokenCache, taps: list[int]
    ) -> dict[str, Tensor]:
        rows = ids_BT.tolist()
        cache.rows = [ids[:n] for ids, n in zip(rows, lengths, strict=True)]
        states = [[self.state(tuple(ids[: t + 1])) for t in range(len(ids))] for ids in rows]
        return _features(states, taps)

    def forward(
        self,
        ids_BN: Tensor,
        cache: TokenCache,
        ancestors_BNN: Tensor,
        depth_BN: Tensor | None,
        taps: list[int],
        valid_BN: Tensor | None = None,
    ) -> dict[str, Tensor]:
        cache.nodes = ids_BN.tolist()
        seen = ancestors_BNN.expand(len(ids_BN), -1, -1).tolist()
        states = [
            [
                self.state(
                    (*past, *(token for token, look in zip(nodes, looks, strict=True) if look))
                )
                for looks in rows
            ]
            for past, nodes, rows in zip(cache.rows, cache.nodes, seen, strict=True)
        ]
        return _features(states, taps)


def _features(states: list[list[Tensor]], taps: list[int]) -> dict[str, Tensor]:
    """As `TargetModel` gives them, every tap being the state itself."""
    hidden = torch.stack([torch.stack(row) for row in states])
    tapped = {"taps": hidden[:, :, None].expand(-1, -1, len(taps), -1)} if taps else {}
    return {"hidden": hidden} | tapped


@dataclass(frozen=True)
class Nothing:
    """A state that remembers the rows' texts."""

    rows: list[list[int]]

    def select(self, rows: Tensor) -> Nothing:
        return Nothing([self.rows[row] for row in rows.tolist()])


@dataclass
class RandomPoints:
    """Proposes a tree of points that depends on the row's text alone."""

    vocab: int
    seed: int
    max_depth: int = 2
    name: str = "points"
    taps: list[int] = field(default_factory=list)

    def start(self, ids_BT: Tensor, length_B: Tensor, features: dict) -> Nothing:
        rows = zip(ids_BT.tolist(), length_B.tolist(), strict=True)
        return Nothing([ids[: n + 1] for ids, n in rows])

    def advance(self, state: Nothing, committed_BM: Tensor, count_B: Tensor, features: dict) -> Any:
        rows = zip(state.rows, committed_BM.tolist(), count_B.tolist(), strict=True)
        return Nothing([ids + new[:n] for ids, new, n in rows])

    def propose(
        self, state: Nothing, root_B: Tensor, plan: Plan, sampling: Any, noise: Any
    ) -> Draft:
        trees = [self._tree(ids, min(plan.depth, self.max_depth)) for ids in state.rows]
        return Draft.points([ids for ids, _ in trees], [parents for _, parents in trees])

    def _tree(self, text: list[int], depth: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{self.seed} {text}")
        ids, parents, level = [text[-1]], [-1], [0]
        for _ in range(depth):
            below = []
            for parent in level:
                for token in rng.sample(range(self.vocab), rng.choice([1, 2])):
                    ids.append(token)
                    parents.append(parent)
                    below.append(len(ids) - 1)
            level = below[:2]
        return ids, parents
