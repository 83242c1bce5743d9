"""What holds during one forward only: taps of one thread, evaluation mode."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fixtures import PROMPTS, TARGETS, double, plain, stock, tiny

from selfdraft.inference.taps import evaluating, tapped
from selfdraft.inference.target import TargetModel

IDS, LENGTH, TAPS = torch.tensor([[3, 9, 200]]), torch.tensor([3]), [0, 1, 2]


def test_a_forward_of_another_thread_is_not_tapped() -> None:
    target = double()
    with tapped(target.layers, TAPS) as states, ThreadPoolExecutor(1) as pool:
        pool.submit(target.features, IDS, LENGTH, TAPS).result()
        assert states == {}
        own = target.features(IDS, LENGTH, TAPS)["taps"]
    assert all(states[tap].equal(own[:, :, tap]) for tap in TAPS)


def test_a_model_that_trains_goes_on_training() -> None:
    """Dropout is off in our forwards, also after a later train(); each module's mode stays."""
    model = stock(TARGETS["gpt2"])
    expected = plain(tiny("gpt2"), PROMPTS[:2], 8)
    for target in (TargetModel(model.train()), TargetModel(model.eval())):
        model.train()
        model.transformer.h[0].eval()
        modes = [module.training for module in model.modules()]
        assert plain(target, PROMPTS[:2], 8) == expected
        assert [module.training for module in model.modules()] == modes
        assert len(set(modes)) == 2


def test_a_part_that_trains_alone_does_not_in_our_forwards() -> None:
    """As an adapter's new layers do in a model that does not."""
    model = stock(TARGETS["gpt2"]).eval()
    model.transformer.h[0].train()
    assert plain(TargetModel(model), PROMPTS[:2], 8) == plain(tiny("gpt2"), PROMPTS[:2], 8)
    assert model.transformer.h[0].training and not model.training


def test_the_mode_is_restored_after_a_failure() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)).train()
    with pytest.raises(ZeroDivisionError), evaluating(model.modules()):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert all(module.training for module in model.modules())
