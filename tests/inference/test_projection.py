"""What the projection keeps: the products of all ids, and those of heads that are there."""

import gc

import torch
from fixtures import PROMPTS, double, make_head

from selfdraft.inference.speculator import Speculator


def test_the_product_of_some_ids_goes_with_these() -> None:
    project, hidden = double().spec.projector, torch.randn(2, 64, dtype=torch.float64)
    whole, ids = project(None, False)(hidden), torch.tensor([3, 5, 9])
    before = len(project._made)
    for drafting in (False, True, False):
        torch.testing.assert_close(project(ids, drafting)(hidden), whole[:, ids])
    assert len(project._made) == before + 1
    del ids
    assert len(project._made) == before


def test_the_products_of_a_head_go_with_it() -> None:
    target = double()
    plain = Speculator(target)
    plain.generate(PROMPTS, max_new_tokens=4)
    made = target.spec.projector._made
    before = len(made)
    spec = Speculator(target, make_head("hydra", target.spec, draft_ids=[3, 5, 9]))
    spec.generate(PROMPTS, max_new_tokens=4)
    assert len(made) == before + 1
    del spec
    gc.collect()
    assert len(made) == before
