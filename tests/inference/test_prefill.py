"""Prompts that are read in parts: in chunks, and rows of like length together."""

import pytest
import torch
from fixtures import CLOSE, batch_of, precise, tiny

from selfdraft.inference import prefill

ALONE = torch.ones(1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("together", [1000, 45])
@pytest.mark.parametrize(
    ("made", "name"),
    [(precise, name) for name in ("llama", "mistral", "gemma2", "gpt2")]
    + [(tiny, name) for name in ("llama", "mistral", "gpt2")],
)
def test_prefill_in_parts_equals_one_pass(made, name: str, together: int, monkeypatch) -> None:
    """In chunks, and all rows together or the middle ones; with padding, and without (`tiny`)."""
    target, lengths = made(name), [37, 8, 20, 1]
    batch = batch_of(lengths)
    whole = target.features(batch["ids"], batch["length"], [0, 2])
    monkeypatch.setattr(prefill, "CHUNK", 8)
    monkeypatch.setattr(prefill, "TOGETHER", together)
    cache = target.new_cache(4, 64)
    with torch.no_grad():
        chunked = target.prefill(batch["ids"], lengths, cache, [0, 2])
        following = target.forward(batch["ids"][:, :1], cache, ALONE, None, [])["hidden"]
    assert cache.lengths == lengths
    for row, length in enumerate(lengths):
        for name_ in whole:
            got, expected = chunked[name_][row, :length], whole[name_][row, :length]
            torch.testing.assert_close(got, expected, **CLOSE[target.dtype])
        # The cache is the row's own.
        longer = torch.cat([batch["ids"][row, :length], batch["ids"][row, :1]])[None]
        expected = target.features(longer, torch.tensor([length + 1]), [])["hidden"][0, -1]
        torch.testing.assert_close(following[row, 0], expected, **CLOSE[target.dtype])


def test_rows_of_like_length_are_read_together() -> None:
    lengths = [10, 60, 74, 77, 400, 490, 700, 5000, 5000, 9000]
    groups = [lengths[rows] for rows in prefill.like_lengths(lengths)]
    assert groups == [[10, 60, 74], [77], [400, 490], [700], [5000], [5000], [9000]]
    assert prefill.like_lengths([7]) == [slice(0, 1)]
