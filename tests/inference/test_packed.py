"""Weights laid out by oneDNN and MKL: the right product for any rows and threads."""

import pytest
import torch

from selfdraft.inference import packed


def working(name: str) -> packed.Make:
    make = packed.LIBRARIES[name]
    if not packed.works(make, 1e-4):
        pytest.skip(f"this PyTorch lacks {name}'s operators")
    return make


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", packed.LIBRARIES)
@pytest.mark.parametrize("shape", [(1, 7), (17, 5), (96, 64), (200, 300), (1100, 1600)])
def test_any_rows_and_threads_give_the_product(name: str, shape: tuple[int, int]) -> None:
    make = working(name)
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    inputs = [torch.randn(rows, shape[1]) for rows in (1, 2, 3, 4, 7, 16, 33, 127, 128, 129, 300)]
    exact = [x.double() @ weight.T.double() for x in inputs]
    close = {"rtol": 1e-5, "atol": 3e-4, "check_dtype": False}
    for packing in (1, 2):
        torch.set_num_threads(packing)
        plain, biased = make(weight, None), make(weight, bias)
        for computing in (1, 2, 3):
            torch.set_num_threads(computing)
            for x, wanted in zip(inputs, exact, strict=True):
                torch.testing.assert_close(plain(x), wanted, **close)
                torch.testing.assert_close(biased(x), wanted + bias, **close)


@pytest.mark.parametrize("name", packed.LIBRARIES)
def test_any_form_of_input_is_taken(name: str) -> None:
    make = working(name)
    weight = torch.randn(24, 16)
    product = make(weight.T.contiguous().T, None)  # its own strides
    for x in (torch.randn(2, 3, 16), torch.randn(16, 4).T, torch.randn(5, 32)[:, ::2]):
        torch.testing.assert_close(product(x), x @ weight.T)
    assert product(torch.randn(0, 16)).shape == (0, 24)
    for width in (8, 32):
        with pytest.raises(RuntimeError):
            product(torch.randn(3, width))


@pytest.mark.parametrize(
    ("processor", "library"),
    [("vendor_id : GenuineIntel", "MKL"), ("vendor_id : AuthenticAMD", "oneDNN"), ("", "oneDNN")],
)
def test_the_processor_chooses_among_what_there_is(monkeypatch, processor, library) -> None:
    monkeypatch.setattr(packed, "_processor", lambda: processor)
    choose = packed.library.__wrapped__
    everything = dict.fromkeys(packed.LIBRARIES, working(library))
    monkeypatch.setattr(packed, "LIBRARIES", everything)
    assert choose() == library
    only = {"oneDNN": "MKL", "MKL": "oneDNN"}[library]
    monkeypatch.setattr(packed, "LIBRARIES", {only: working(library)})
    assert choose() == only
    monkeypatch.setattr(packed, "LIBRARIES", {})
    assert choose() is None
