"""What a node costs is measured, and decides how much is drafted; whatever it is, text stays."""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import PROMPTS, TARGETS, plain, stock, tiny

from selfdraft.heads import InputError, Plan
from selfdraft.inference import planner
from selfdraft.inference.drafters import Plain
from selfdraft.inference.ngram import NGram
from selfdraft.inference.planner import (
    CPU_COST,
    MOST,
    NODES,
    default_plan,
    node_cost,
    paying_plan,
)
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import drafting


class Timed:
    """A target of known cost: a forward takes `root` seconds and `node` for each further token."""

    device, vocab_size = torch.device("cpu"), 64

    def __init__(self, root: float, node: float, max_positions: int = 512) -> None:
        self.root, self.node, self.max_positions = root, node, max_positions
        self.forwards = 0

    def new_cache(self, rows: int, capacity: int) -> None:
        """None is needed."""

    def forward(self, ids_BN: torch.Tensor, *_: Any) -> dict[str, torch.Tensor]:
        self.forwards += 1
        assert ids_BN.shape[1] <= self.max_positions
        time.sleep(self.root + self.node * (ids_BN.shape[1] - 1))
        return {"hidden": torch.zeros(1)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("share", [0.03, 0.12])
def test_the_cost_of_a_node_is_found_once(share: float) -> None:
    target: Any = Timed(0.01, 0.01 * share)
    found = node_cost(target)
    assert share / 1.5 < found < share * 1.5
    before = target.forwards
    assert node_cost(target) == found and target.forwards == before > 0


def test_costs_are_bounded_and_slow_targets_are_not_measured_for_long(monkeypatch) -> None:
    monkeypatch.setattr(planner, "SECONDS", 0.01)
    dear: Any = Timed(0.004, 0.02)
    assert node_cost(dear) == MOST
    assert dear.forwards == 4  # two that allocate, and one pair
    slow: Any = Timed(0.02, 0.0)
    assert node_cost(slow) == CPU_COST
    assert node_cost(slow) == CPU_COST and slow.forwards == 1
    monkeypatch.setattr(planner, "SECONDS", 1.0)
    free: Any = Timed(0.005, 0.0)
    assert planner.LEAST <= node_cost(free) < 0.02


@pytest.mark.parametrize("positions", [8, NODES, NODES + 1, 40])
def test_targets_of_few_positions(positions: int) -> None:
    target: Any = Timed(0.002, 0.0, positions)
    cost = node_cost(target)
    assert (target.forwards > 0) == (positions > NODES)
    assert target.forwards or cost == CPU_COST


def test_cheaper_nodes_may_be_less_likely() -> None:
    drafter = NGram()
    dear, cheap = paying_plan(drafter, 0.05), paying_plan(drafter, 0.01)
    assert (dear.nodes, dear.worth) == (NODES, 0.08)
    assert (cheap.nodes, cheap.worth) == (NODES, 0.016)
    assert dear.depth == cheap.depth == drafter.max_depth


def test_on_a_cpu_the_default_is_the_same_every_time(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(planner, "node_cost", lambda target: asked.append(target) or 0.01)
    on_cpu, elsewhere = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))
    assert default_plan(NGram(), on_cpu) == paying_plan(NGram(), CPU_COST)
    assert default_plan(Plain(), elsewhere).depth == 0 and not asked  # nothing to plan
    assert default_plan(NGram(), elsewhere) == paying_plan(NGram(), 0.01)
    assert asked == [elsewhere]


def test_a_measured_plan_decodes_what_plain_does(monkeypatch) -> None:
    target = tiny()
    spec = Speculator(target, NGram(), "measured")
    assert spec.plan == paying_plan(NGram(), node_cost(target))
    assert spec.generate(PROMPTS, max_new_tokens=16).token_ids == plain(target, PROMPTS, 16)
    named = Speculator.from_pretrained(target=target, drafter="ngram", plan="measured")
    assert named.plan == spec.plan
    monkeypatch.setitem(planner._COSTS, target, 0.25)
    assert Speculator(target, NGram(), "measured").plan.worth == 0.4


def test_words_that_are_no_plan() -> None:
    with pytest.raises(InputError, match="plan is 'fast'"):
        Speculator(tiny(), NGram(), "fast")


def test_a_plan_that_is_set_later_is_one_too() -> None:
    spec = Speculator(tiny(), NGram())
    spec.plan = 2
    assert spec.plan == Plan(2)
    spec.plan = "measured"
    assert spec.plan == paying_plan(NGram(), node_cost(spec.target))
    for bad in ("fast", -1):
        with pytest.raises(InputError, match="plan"):
            spec.plan = bad
    assert spec.plan.nodes == NODES


def test_commands_measure_where_asked(monkeypatch) -> None:
    target = tiny()
    monkeypatch.setitem(planner._COSTS, target, 0.01)
    plans = [drafting.plan(asked(*words), target, NGram()) for words in ([], ["--measured"])]
    assert [plan.worth for plan in plans] == [0.08, 0.016]
    deepest = NGram().max_depth
    for words, plan in (
        (["--worth", "0.3"], Plan(deepest, nodes=NODES, worth=0.3)),
        (["--nodes", "4", "--worth", "0.3"], Plan(deepest, nodes=4, worth=0.3)),
        (["--draft", "2"], Plan(2)),
    ):
        assert drafting.plan(asked(*words), target, NGram()) == plan


@pytest.mark.parametrize(
    "words", [["--measured", "--nodes", "4"], ["--measured", "--draft", "2"], ["--worth", "nan"]]
)
def test_sizes_that_do_not_fit_are_refused_before_anything_loads(words: list[str]) -> None:
    with pytest.raises(InputError, match=words[0]):
        drafting.load(asked("/no/such/heads", *words))


def asked(*words: str) -> argparse.Namespace:
    cli = argparse.ArgumentParser()
    drafting.add_options(cli)
    return cli.parse_args(words)


def test_each_forward_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch) -> None:
    """A GPU is only asked for a forward; what it was asked before would be timed with it."""
    target: Any = Timed(0.0, 0.0)
    begun = []
    monkeypatch.setattr(planner, "_finish", lambda device: begun.append(target.forwards))
    node_cost(target)
    assert begun == [n for k in range(target.forwards) for n in (k, k + 1)]


def test_other_devices_are_waited_for(monkeypatch) -> None:
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    planner._finish(torch.device("cpu"))
    assert not waited
    planner._finish(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.gpu
def test_on_a_gpu_the_default_is_measured() -> None:
    target = TargetModel(stock(TARGETS["llama"], 0, torch.float32).cuda())
    spec = Speculator.from_pretrained(target=target, drafter="ngram")
    assert spec.plan == paying_plan(NGram(), node_cost(target))
    assert spec.generate(PROMPTS, max_new_tokens=16).token_ids == plain(target, PROMPTS, 16)
