"""Fixtures of the decoding tests."""

from typing import Any

import pytest
from fixtures import PROMPTS, plain, tiny


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target for which the 8th greedy token of PROMPTS[1], or an earlier equal one, is EOS;
    the answer up to it, and what greedy decoding would write if it went on."""
    target = tiny()
    answer = plain(target, PROMPTS[1:2], 40)[0]
    monkeypatch.setattr(target, "eos_ids", {answer[7]})
    return target, answer[: answer.index(answer[7]) + 1], answer
