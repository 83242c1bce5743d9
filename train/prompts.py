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
from .chat import chat_ids
from .formats import Conversation
from .meta import take_up, write_meta
from .reading import RowError

DRAWS_A_PROMPT = 8
"""So many draws for each prompt that is wanted; then the target is given up."""

Draw = Callable[[list[int]], list[str | None]]
"""numbers of draws -> a text each; None where it is no prompt."""


def turn_opening(target: TargetModel) -> list[int]:
    """Ids that stand before a user's first words.

    Raises:
        InputError: the template refuses a lone user, or does not close the turn with a token that
            ends a generation, so that the end of a prompt would not be seen.
    """
    advice = "It cannot write prompts; name a file of prompts in data.prompts."
    turns = ([{"role": "user", "content": text}] for text in ("A b c", "Why so"))
    try:
        one, other = (chat_ids(Conversation(turn, []), target, prompt=False) for turn in turns)
    except RowError as error:
        raise InputError(str(error), advice) from None
    start, tail = _alike(one, other), _alike(one[::-1], other[::-1])
    if not start or not tail or one[-tail] not in target.eos_ids:
        raise InputError(
            "the target's chat template does not close a user's turn with an end-of-turn token",
            advice,
        )
    return one[:start]


class Writer:
    """A `Draw` of the target."""

    def __init__(
        self, target: TargetModel, max_tokens: int, temperature: float, top_p: float, seed: int = 0
    ) -> None:
        self.opening, self.max_tokens, self.seed = turn_opening(target), max_tokens, seed
        self.law: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        self.speculator = Speculator.from_pretrained(target=target, drafter="none")
        known = target.tokenizer.added_tokens_decoder
        self.marks = {number for number, token in known.items() if token.special}

    def __call__(self, numbers: list[int]) -> list[str | None]:
        """See `Draw`: a turn that is not closed within the tokens, opens another one or has no word
        is none."""
        found = self.speculator.generate(
            [self.opening] * len(numbers),
            seed=[(self.seed << 32) + number for number in numbers],
            batch_size=len(numbers),
            max_new_tokens=self.max_tokens,
            **self.law,
        )
        return [
            text.strip()
            if end == "eos" and not self.marks & {*ids[:-1]} and any(c.isalpha() for c in text)
            else None
            for text, ids, end in zip(
                found.texts, found.token_ids, found.finish_reasons, strict=True
            )
        ]


def write_prompts(
    target: TargetModel,
    path: Path,
    count: int,
    batch_size: int,
    draw: Draw,
    settings: dict[str, Any],
) -> tuple[int, int]:
    """Brings `path` to `count` prompts, no two alike; one that was begun is gone on with.

    Args:
        settings: of `draw`, which are kept beside the file.
    Returns:
        the number of prompts that it has, and of draws.
    Raises:
        InputError: the file was made by other means, or the target writes too few.
    """
    known, following = _open(target, path, settings)
    drawn, wanted = 0, count - len(known)
    bar = tqdm(total=max(count, len(known)), initial=len(known), desc="prompts")
    with bar, path.open("a", encoding="utf-8") as file:
        while len(known) < count:
            if drawn >= DRAWS_A_PROMPT * wanted:
                raise InputError(
                    f"only {len(known)} of {count} prompts came of {drawn} draws; {path} has them",
                    "Use these, or draw more tokens or at a lower temperature to another file.",
                )
            numbers = list(range(following, following + batch_size))
            following, drawn = following + batch_size, drawn + batch_size
            rows = []
            for number, text in zip(numbers, draw(numbers), strict=True):
                if text is not None and text.casefold() not in known and len(known) < count:
                    known.add(text.casefold())
                    rows.append({"prompt": text, "draw": number})
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            bar.update(len(rows))
    write_meta(path, target, settings, complete=True)
    return len(known), drawn


def _open(target: TargetModel, path: Path, settings: dict[str, Any]) -> tuple[set[str], int]:
    """The prompts that `path` has, and the number of the next draw."""
    known, following = set[str](), 0
    for number, row in take_up(path, target, settings, "give another --output"):
        if not (isinstance(row.get("prompt"), str) and type(row.get("draw")) is int):
            reason = f"{path}, line {number} has no prompt or not the number of its draw"
            raise InputError(reason, "Give another --output; this file was changed.")
        known.add(row["prompt"].casefold())
        following = max(following, row["draw"] + 1)
    return known, following


def _alike(one: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
