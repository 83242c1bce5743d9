"""Prompts that come as one tensor: rows of equal length, without padding."""

from typing import Any

import pytest
import torch
from fixtures import EOS, LLAMA, tiny

from selfdraft.heads import InputError
from selfdraft.inference.prompts import prompt_ids
from selfdraft.inference.target import TargetModel

PAD = 256


@pytest.fixture(scope="module")
def padding() -> TargetModel:
    """A target whose pad id means nothing else."""
    target = TargetModel.load(random=LLAMA, dtype="float32", device="cpu")
    target.tokenizer.pad_token = "<|endoftext|>"
    return target


@pytest.mark.parametrize("rows", [[[PAD, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, PAD, PAD]]])
def test_padded_rows_are_refused(rows: list[list[int]], padding: TargetModel) -> None:
    with pytest.raises(InputError, match=f"pad id {PAD}") as error:
        prompt_ids(padding, torch.tensor(rows), True)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([[1, PAD, 2], [3, 4, 5]]),
        torch.tensor([[PAD, 1, PAD]]),
        torch.tensor([PAD, 1, PAD]),
        [[PAD, 1], [2, PAD, PAD]],
        torch.tensor([[1, EOS], [EOS, 2]]),
    ],
    ids=["inside", "one row", "one prompt", "lists", "ends of sequence"],
)
def test_other_rows_are_taken(prompts: Any, padding: TargetModel) -> None:
    """Where the pad id is the end of sequence too, as for `tiny`, it may be text."""
    for target in (padding, tiny()):
        rows, _ = prompt_ids(target, prompts, True)
        given = [prompts.tolist()] if getattr(prompts, "ndim", 2) == 1 else list(prompts)
        assert rows == [list(map(int, row)) for row in given]
