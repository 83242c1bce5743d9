"""Settings of a head that would be ignored, or fit no target, are refused and named."""

import math

import pytest
import torch
from fixtures import make_head, tiny
from pydantic import ValidationError
from torch import Tensor

from selfdraft.heads import HEADS, InputError


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("eagle", {"taps": [], "fusion": "fc"}, "taps is empty"),
        ("eagle", {"taps": [-3]}, "greater than or equal to 0"),
        ("hydra", {"taps": [-3]}, "greater than or equal to 0"),
        ("eagle", {"feature_loss": math.inf}, "finite number"),
        ("hydra", {"decay": math.nan}, "finite number"),
        ("medusa", {"lk_eta": 10.0}, "no lk_hybrid in loss"),
        ("medusa", {"lk_eta": 10.0, "loss": {"kl": 1.0, "lk": 0.5}}, "no lk_hybrid in loss"),
    ],
    ids=str,
)
def test_what_would_be_ignored_or_means_nothing_is_refused(kind, fields, problem) -> None:
    with pytest.raises(ValidationError, match=problem):
        HEADS[kind].Config(**fields)


def test_eta_beside_the_objective_that_it_is_of() -> None:
    for loss in ("lk_hybrid", {"ce": 1.0, "lk_hybrid": 0.5}):
        assert HEADS["hydra"].Config(loss=loss, lk_eta=10.0).lk_eta == 10.0


def test_a_rank_above_the_hidden_size() -> None:
    make_head("hydra", tiny().spec, low_rank=64)
    with pytest.raises(InputError, match=r"low_rank is 65.* 64\n"):
        make_head("hydra", tiny().spec, low_rank=65)


class Own(HEADS["hydra"]):  # type: ignore[misc]
    """A kind whose lm_head no field of its config tells of."""

    def output_weights(self) -> list[Tensor]:
        return [mlp.out.weight for mlp in self.mlps]


def test_an_lm_head_of_its_own_is_known_by_its_weights() -> None:
    spec = tiny().spec
    assert make_head("hydra", spec, draft_ids=[1, 5]).can_widen
    assert not Own(HEADS["hydra"].Config(kind="hydra"), spec, torch.tensor([1, 5])).can_widen
