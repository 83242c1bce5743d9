"""The target writes prompts, for those who have none: what it puts where a user would speak
(arXiv 2406.08464).

A chat model has learned the turns of its users too, so behind the opening of a user's turn it goes
on with a question of the kind that it was tuned on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..heads.errors import InputError
from ..inference.speculator import Speculator
from ..inference.target import TargetModel
from .meta import check_settings, read_meta, write_meta
from .reading import whole_lines

DRAWS_A_PROMPT = 8
"""So many draws for each prompt that is wanted; then the target is given up."""

Draw = Callable[[list[int]], list[str | None]]
"""seeds -> a text each; None where it is no prompt."""


def turn_opening(target: TargetModel) -> list[int]:
    """Ids that stand before a user's first words.

    Raises:
        InputError: the template does not close a user's turn with a token that ends a generation,
            so that the end of a prompt would not be seen.
    """
    one, other = (
        target.chat_ids([{"role": "user", "content": text}], False) for text in ("A b c", "Why so")
    )
    start, tail = _alike(one, other), _alike(one[::-1], other[::-1])
    if not start or not tail or one[-tail] not in target.eos_ids:
        raise InputError(
            "the target's chat template does not close a user's turn with an end-of-turn token",
            "It cannot write prompts; name a file of prompts in data.prompts.",
        )
    return one[:start]


class Writer:
    """A `Draw` of the target."""

    def __init__(
        self, target: TargetModel, max_tokens: int, temperature: float, top_p: float
    ) -> None:
        self.opening, self.max_tokens = turn_opening(target), max_tokens
        self.law: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        self.speculator = Speculator.from_pretrained(target=target, drafter="none")

    def __call__(self, seeds: list[int]) -> list[str | None]:
        """See `Draw`: a turn that is not closed within the tokens, or has no word, is none."""
        found = self.speculator.generate(
            [self.opening] * len(seeds),
            seed=seeds,
            batch_size=len(seeds),
            max_new_tokens=self.max_tokens,
            **self.law,
        )
        ends = zip(found.texts, found.finish_reasons, strict=True)
        return [
            text.strip() if end == "eos" and any(c.isalpha() for c in text) else None
            for text, end in ends
        ]


def write_prompts(
    target: TargetModel,
    path: Path,
    count: int,
    seed: int,
    batch_size: int,
    draw: Draw,
    settings: dict[str, Any],
) -> int:
    """Brings `path` to `count` prompts, no two alike; one that was begun is gone on with.

    Returns:
        number of draws.
    Raises:
        InputError: the file was made by other means, or the target writes too few.
    """
    known, following = _open(target, path, seed, settings)
    drawn, wanted = 0, count - len(known)
    with tqdm(total=count, initial=len(known), desc="prompts") as bar, path.open("a") as file:
        while len(known) < count:
            if drawn >= DRAWS_A_PROMPT * wanted:
                raise InputError(
                    f"only {len(known)} of {count} prompts came of {drawn} draws; {path} has them",
                    "Raise --max-tokens, or lower --temperature.",
                )
            seeds = list(range(following, following + batch_size))
            following, drawn = following + batch_size, drawn + batch_size
            rows = []
            for number, text in zip(seeds, draw(seeds), strict=True):
                if text is not None and text.casefold() not in known and len(known) < count:
                    known.add(text.casefold())
                    rows.append({"prompt": text, "seed": number})
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            bar.update(len(rows))
    return drawn


def _open(
    target: TargetModel, path: Path, seed: int, settings: dict[str, Any]
) -> tuple[set[str], int]:
    """The prompts that `path` has, and the seed of the next draw."""
    known, following = set[str](), seed
    if path.exists() and path.stat().st_size:
        check_settings(path, read_meta(path, target), settings)
        if whole_lines(path):
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            known = {row["prompt"].casefold() for row in rows}
            following = rows[-1]["seed"] + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    write_meta(path, target, settings)
    return known, following


def _alike(one: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
