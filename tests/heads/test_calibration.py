"""What a head promises, made to agree with what it keeps."""

import pytest
import torch

from selfdraft.heads.calibration import FACTORS, LOWEST, sharpness, top_chances


def test_top_chances_are_those_of_scaled_laws() -> None:
    logits = 4 * torch.randn(7, 30, dtype=torch.float64)
    found = top_chances(logits)
    for factor, chance in enumerate(found):
        law = (LOWEST * 2**factor * logits).softmax(-1)
        torch.testing.assert_close(chance, law.amax(-1), rtol=1e-10, atol=0)
    assert len(found) == FACTORS


@pytest.mark.parametrize("factor", [0.3, 1.0, 7.0, 40.0])
def test_a_head_that_is_too_sure_or_not_sure_enough_is_found_out(factor: float) -> None:
    """Tokens are drawn from laws that are `factor` times as sharp as the head's."""
    torch.manual_seed(0)
    logits = torch.randn(4000, 12, dtype=torch.float64) / factor**0.5
    law = (factor * logits).softmax(-1)
    hit = law.multinomial(1)[:, 0] == logits.argmax(-1)
    chances = top_chances(logits).mean(1)[:, None].tolist()
    (found,) = sharpness(chances, [float(hit.double().mean())])
    assert found == pytest.approx(factor, rel=0.15)
    assert float((found * logits).softmax(-1).amax(-1).mean()) == pytest.approx(
        float(hit.double().mean()), abs=0.02
    )


def test_the_ends_hold_and_depths_without_rows_are_left_alone() -> None:
    rising = [[0.1 + 0.05 * i, None] for i in range(FACTORS)]
    assert sharpness(rising, [0.0, None]) == [LOWEST, 1.0]
    assert sharpness(rising, [1.0, None]) == [LOWEST * 2 ** (FACTORS - 1), 1.0]
