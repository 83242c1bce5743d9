"""Weights in eight bits: close to the product, each row on its own, left alone where they must."""

import pytest
import torch

from selfdraft.inference import packed, rounded

needs_operator = pytest.mark.skipif(
    not rounded.rounding_available(), reason="this PyTorch lacks the operator"
)


@needs_operator
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("out", [1, 7, 130])
def test_a_product_is_near_and_a_row_does_not_depend_on_the_others(rows: int, out: int) -> None:
    torch.manual_seed(rows)
    weight, x, bias = torch.randn(out, 96), torch.randn(2, rows, 96), torch.randn(out)
    weight[0] *= 1e-6  # a scale for each row
    product = rounded.product(weight, bias)
    exact = x @ weight.T
    size = x.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    assert ((product(x) - bias - exact).abs() <= 0.01 * size + 1e-6).all()
    one = product(x[1:, :1])
    assert product(x)[1:, :1].equal(one)
    assert not product(x).equal(packed.product(weight, bias)(x))  # rounded, in truth


@needs_operator
def test_zeros_stay_zeros_and_what_is_not_finite_stays_that() -> None:
    weight = torch.randn(5, 64)
    assert not rounded.product(torch.zeros(5, 64))(torch.randn(3, 64)).any()
    assert rounded.product(weight)(torch.full((1, 64), torch.nan)).isnan().all()
    weight[2, 3] = torch.nan
    exact = torch.nn.functional.linear(torch.ones(1, 64), weight)
    torch.testing.assert_close(rounded.product(weight)(torch.ones(1, 64)), exact, equal_nan=True)


@pytest.mark.parametrize("shape", [(5, 33), (4, 31), (3, 36)])
def test_odd_widths_are_not_rounded(shape: tuple[int, int]) -> None:
    """The operator would read past a row's end."""
    weight, x = torch.randn(shape), torch.randn(2, shape[1])
    torch.testing.assert_close(rounded.product(weight)(x), x @ weight.T)


def test_other_types_are_left_alone() -> None:
    weight, x = torch.randn(4, 32).double(), torch.randn(2, 32).double()
    torch.testing.assert_close(rounded.product(weight)(x), x @ weight.T, rtol=1e-14, atol=1e-14)


def test_the_trial_leaves_the_callers_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert packed.works(packed.product, 1e-4)
    assert torch.get_rng_state().equal(before)
