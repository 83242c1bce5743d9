"""The odometer: every path of a run's random decisions, with its exact weight.

A run asks a `Tape` for each decision.  The tape replays the decisions of the path at hand, takes
the first possible option where the path ends, and afterwards is turned to the next path; options
of probability 0 are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from selfdraft.heads.protocols import Purpose
from selfdraft.inference import decode
from selfdraft.inference.cache import SlotCache
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel


class Tape:
    """Decisions of one run: (option taken, options that are possible after it)."""

    def __init__(self) -> None:
        self.path: list[tuple[int, list[int]]] = []
        self.rewind()

    def rewind(self) -> None:
        self.place, self.weight = 0, 1.0
        self.keys: set[Hashable] = set()

    def choose(self, weights: list[float]) -> int:
        """One of the options, whose weights are normalised first."""
        if self.place == len(self.path):
            possible = [option for option, weight in enumerate(weights) if weight > 0]
            self.path.append((possible[0], possible[1:]))
        option = self.path[self.place][0]
        self.place += 1
        self.weight *= weights[option] / sum(weights)
        return option

    def turn(self) -> bool:
        """To the next path; False after the last one."""
        assert self.place == len(self.path), "the run is no function of its decisions"
        while self.path:
            _, rest = self.path.pop()
            if rest:
                self.path.append((rest[0], rest[1:]))
                return True
        return False


class TapeNoise:
    """`heads.protocols.Noise` that takes its decisions from a tape.

    No key (row, length, node, purpose) may be asked for twice in a run: that would be one coin
    used for two decisions.
    """

    def __init__(
        self, tape: Tape, seeds: list[int] | None = None, lengths: list[int] | None = None
    ) -> None:
        self.tape, self.seeds, self.lengths = tape, seeds, lengths

    def _use(self, row: int, node: int, purpose: Purpose) -> None:
        name = row if self.seeds is None else self.seeds[row]
        key = (name, self.lengths[row] if self.lengths else 0, node, purpose)
        assert key not in self.tape.keys, f"coin {key} used twice"
        self.tape.keys.add(key)

    def bernoulli(self, probability: float, row: int, node: int) -> bool:
        assert 0 <= probability <= 1
        self._use(row, node, Purpose.ACCEPT)
        return self.tape.choose([probability, 1 - probability]) == 0

    def categorical(self, law_V: Tensor, row: int, node: int, purpose: Purpose) -> int:
        self._use(row, node, purpose)
        return self.tape.choose(law_V.double().tolist())


def exact_law(run: Callable[[Tape], Any]) -> dict[Any, float]:
    """Mass of every outcome of `run`, over all its decisions."""
    tape, law = Tape(), defaultdict(float)
    while True:
        tape.rewind()
        outcome = run(tape)
        law[outcome] += tape.weight
        if not tape.turn():
            return dict(law)


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    """Total variation of two laws."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def memoised(target: TargetModel) -> TargetModel:
    """`target` with its decoder's results kept by everything that they depend on: ids, positions,
    mask and the cache slots that the mask lets through.  A hit still writes the cache."""
    inner, memo = target._run, {}

    def run(taps: list[int], **inputs: Any) -> dict[str, Tensor]:
        cache, mask = inputs.get(target._cache_name), inputs.get("attention_mask")
        if not isinstance(cache, SlotCache):
            return inner(taps, **inputs)
        seen = (mask > -1).any(2)[:, 0]
        slots = seen.shape[1]
        content = [
            b[:, :, :slots].masked_fill(~seen[:, None, :, None], 0.0).numpy().tobytes()
            for b in (*cache.keys, *cache.values)
            if b is not None
        ]
        tensors = (inputs["input_ids"], inputs["position_ids"], seen, mask)
        key = (
            *taps,
            *content,
            *(t.shape for t in tensors),
            *(t.numpy().tobytes() for t in tensors),
        )
        if key in memo:
            features, written = memo[key]
            for arguments in written:
                cache.update(*arguments)
            return features
        written, plain_update = [], cache.update

        def update(keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
            written.append((keys.clone(), values.clone(), layer))
            return plain_update(keys, values, layer)

        cache.update = update
        memo[key] = inner(taps, **inputs), written
        del cache.update
        return memo[key][0]

    target._run = run
    return target


def decode_law(
    patch: Any,
    target: Any,
    drafter: Any,
    prompts: list[list[int]],
    plan: Any = None,
    **settings: Any,
) -> dict[Any, float]:
    """The law of the ids that the whole decoding loop gives for `prompts`."""
    speculator = Speculator(target, drafter, plan)

    def run(tape: Tape) -> tuple[tuple[int, ...], ...]:
        patch.setattr(
            decode, "RowNoise", lambda seeds, lengths, names: TapeNoise(tape, seeds, lengths)
        )
        ids = speculator.generate(prompts, do_sample=True, **settings).token_ids
        return tuple(map(tuple, ids))

    return exact_law(run)


def target_law(
    target: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    law_of: Callable[[Tensor, list[int]], Tensor] = lambda logits_V, ids: logits_V.softmax(-1),
) -> dict[Any, float]:
    """The joint law of sampling from the model itself, row by row, token by token.

    Args:
        law_of: law of the next token from its logits and the tokens before it.
    """
    joint: dict[Any, float] = {(): 1.0}
    for prompt in prompts:
        rows: dict[tuple[int, ...], float] = {}

        def grow(
            new: list[int], mass: float, prompt: list[int] = prompt, rows: dict = rows
        ) -> None:
            if new and (new[-1] in target.eos_ids or len(new) == max_new_tokens):
                rows[tuple(new)] = mass
                return
            ids = prompt + new
            with torch.no_grad():
                logits_V = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
            for token, share in enumerate(law_of(logits_V, ids).tolist()):
                if share > 0:
                    grow([*new, token], mass * share)

        grow([], 1.0)
        joint = {(*k, row): m * s for k, m in joint.items() for row, s in rows.items()}
    return joint


def law_of(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, repetition_penalty: float = 1.0
) -> Callable[[Tensor, list[int]], Tensor]:
    """The settings' law, from their definitions."""

    def law(logits_V: Tensor, ids: list[int]) -> Tensor:
        scores = logits_V.clone()
        for token in set(ids):
            factor = repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
            scores[token] *= factor
        scores /= temperature
        if top_k:
            scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
        p = scores.softmax(0)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0
        return p / p.sum()

    return law
