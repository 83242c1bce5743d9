"""Drafters that are no heads, and merges, in the whole loop: the output is plain decoding's."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from fixtures import EOS, PROMPTS, TARGETS, double, make_head, plain, script, stock, tiny
from torch import Tensor

from selfdraft.heads import InputError, Plan
from selfdraft.heads.protocols import Drafter
from selfdraft.inference.draft_model import DraftModel
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

TOKENS = 32
REPEATING = [*PROMPTS, [4, 8, 15, 16, 23, 42] * 3]


def other(target: TargetModel, seed: int = 1) -> TargetModel:
    """A draft model of the target's vocabulary."""
    return TargetModel(stock(TARGETS["llama"], seed, target.dtype), target.tokenizer)


def make(name: str, target: TargetModel) -> Drafter:
    hydra = make_head("hydra", target.spec, depth=3)
    return {
        "ngram": lambda: NGram(),
        "draft_model": lambda: DraftModel(other(target), target),
        "hydra+ngram": lambda: Merged([NGram(), hydra]),
        "draft_model+ngram": lambda: Merged([NGram(), DraftModel(other(target), target)]),
        "itself": lambda: DraftModel(target, target),
    }[name]()


NAMES = ["ngram", "draft_model", "hydra+ngram", "draft_model+ngram"]
PLANS = [Plan(1), Plan(4), Plan(4, nodes=9), Plan(3, tree=((0,), (1,), (0, 0)))]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_the_plain_one(name: str, plan: Plan) -> None:
    target = tiny()
    spec = Speculator(target, make(name, target), plan)
    assert spec.drafter.name == name
    out = spec.generate(REPEATING, max_new_tokens=TOKENS)
    assert out.token_ids == plain(target, REPEATING, TOKENS)


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, nodes=7)])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_itself_alone(name: str, sampled: bool, plan: Plan) -> None:
    target = double()
    spec = Speculator(target, make(name, target), plan)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": sampled, "top_k": 20}
    together = spec.generate(REPEATING, seed=5, **settings).token_ids
    for row, prompt in enumerate(REPEATING):
        assert spec.generate(prompt, seed=5 + row, **settings).token_ids == [together[row]]


def test_the_target_as_its_own_draft_model_is_always_right() -> None:
    target, prompts = double(), PROMPTS[:3]
    target.eos_ids = set()  # draft tokens behind an EOS are not counted as emitted
    out = Speculator(target, make("itself", target), 4).generate(prompts, max_new_tokens=40)
    stats = out.stats
    assert stats.accepted_by_depth == stats.drafted_by_depth
    assert stats.accepted_by == stats.drafted_by
    sampled = Speculator(target, make("itself", target), 4).generate(
        prompts, max_new_tokens=40, do_sample=True
    )
    assert sampled.stats.acceptance_by_depth == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_model_of_few_positions(sampled: bool) -> None:
    """It drafts no further, is not asked where no row has room, and its rows stay themselves."""
    target = double()
    fields = TARGETS["llama"] | {"max_position_embeddings": 24}
    model = TargetModel(stock(fields, 1, target.dtype), target.tokenizer)
    reached, inner = [], model.forward

    def forward(ids_BN: Tensor, cache: Any, *arguments: Any) -> dict[str, Tensor]:
        reached.append(max(cache.lengths) + ids_BN.shape[1])
        return inner(ids_BN, cache, *arguments)

    model.forward = forward  # type: ignore[method-assign]
    spec = Speculator(target, DraftModel(model, target), 4)
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": sampled}
    alone = [spec.generate(ids, seed=s, **settings) for s, ids in enumerate(PROMPTS[:3])]
    assert 20 < max(reached) <= 24
    assert all(out.stats.drafted_by_depth for out in alone)
    together = spec.generate(PROMPTS[:3], **settings).token_ids
    assert together == [out.token_ids[0] for out in alone]
    assert sampled or together == plain(target, PROMPTS[:3], 40)


def test_statistics_tell_the_drafters_apart() -> None:
    """One drafter that is always right, one that copies: what is emitted is the first one's."""
    target = tiny()
    right = script(target)
    spec = Speculator(target, Merged([NGram(), right]), Plan(4))
    stats = spec.generate(PROMPTS, max_new_tokens=24).stats
    assert stats.accepted_by["scripted"] == stats.drafted_by["scripted"]
    assert stats.accepted_by["ngram"] < stats.drafted_by["ngram"]
    assert stats.accepted_by["scripted"] == sum(stats.accepted_by_depth)
    assert sum(stats.seconds.values()) > 0


def test_a_budget_for_all_rows() -> None:
    """The forward reads no more tokens than asked for, and the output stays the plain one."""
    target, widths = tiny(), []
    inner = target.forward

    def forward(ids_BN: Tensor, *arguments: Any) -> dict[str, Tensor]:
        widths.append(ids_BN.shape)
        return inner(ids_BN, *arguments)

    drafter = make("hydra+ngram", target)
    plan = Plan(4, nodes=9, tokens=20)
    target.forward = forward  # type: ignore[method-assign]
    try:
        out = Speculator(target, drafter, plan).generate(REPEATING, max_new_tokens=24)
    finally:
        del target.forward
    rounds = widths[1:]
    assert all(rows * nodes <= 20 or nodes == 1 for rows, nodes in rounds)
    assert any(nodes > 2 for _, nodes in rounds)
    assert out.token_ids == plain(target, REPEATING, 24)


class Renamed:
    """A tokenizer with one id that means something else."""

    def __init__(self, inner: Any, token: int) -> None:
        self.inner, self.token = inner, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        names = self.inner.convert_ids_to_tokens(ids)
        return ["other" if i == self.token else name for i, name in zip(ids, names, strict=True)]


def test_another_vocabulary_of_the_same_size_is_refused() -> None:
    target = tiny()
    draft = TargetModel(stock(TARGETS["llama"], 1), Renamed(target.tokenizer, 70))
    with pytest.raises(InputError, match="id 70 is"):
        DraftModel(draft, target)


@pytest.mark.parametrize("size", [300, 340])
def test_a_padded_vocabulary_is_fine(size: int) -> None:
    """Ids past the tokenizer's are padding: never proposed where the target has none."""
    target = tiny()
    model = stock(TARGETS["llama"] | {"vocab_size": size}, 1)
    drafter = DraftModel(TargetModel(model, target.tokenizer), target)
    out = Speculator(target, drafter, 3).generate(PROMPTS, max_new_tokens=16)
    assert out.token_ids == plain(target, PROMPTS, 16)
    with pytest.raises(InputError, match="size"):
        DraftModel(TargetModel(model), TargetModel(stock(TARGETS["llama"])))


def test_two_heads_with_taps_are_refused() -> None:
    heads = [make_head("hydra", tiny().spec, taps=[1]) for _ in range(2)]
    with pytest.raises(InputError, match="taps"):
        Merged(list(heads))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"drafter": "ngrams"}, "ngram"),
        ({"drafter": "heads"}, "heads folder"),
        ({"drafter": "heads+ngram"}, "heads folder"),
    ],
)
def test_names_of_drafters(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Speculator.from_pretrained(target=tiny(), **asked)


def test_from_pretrained_builds_what_is_named(tmp_path: Any) -> None:
    from selfdraft.heads import save_head

    target = tiny()
    save_head(tmp_path, make_head("hydra", target.spec))
    made = {
        name: Speculator.from_pretrained(tmp_path, target=target, drafter=name).drafter.name
        for name in ("heads", "heads+ngram", "ngram", "none")
    }
    assert made == {
        "heads": "hydra",
        "heads+ngram": "hydra+ngram",
        "ngram": "ngram",
        "none": "plain",
    }
    assert Speculator.from_pretrained(tmp_path, target=target).drafter.name == "hydra+ngram"
    model = stock(TARGETS["llama"], 1)
    assert Speculator.from_pretrained(target=target, drafter=model).drafter.name == "draft_model"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(2, nodes=-1), "nodes"),
        (Plan(2, tokens=0), "tokens"),
        (Plan(2, confidence=1.5), "confidence"),
        (Plan(2, tree=((1,),)), "sibling"),
        (Plan(-1), "depth"),
    ],
)
def test_plans_that_are_none(plan: Plan, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Speculator(tiny(), NGram(), plan)


def test_eos_and_limits_inside_a_tree() -> None:
    target = tiny()
    generator = random.Random(0)
    prompts = [[generator.randrange(256) for _ in range(9)] * 2 for _ in range(24)]
    expected = plain(target, prompts, 30)
    assert any(ids[-1] == EOS and len(ids) < 30 for ids in expected)
    spec = Speculator(target, make("hydra+ngram", target), Plan(4, nodes=9))
    for limit in (1, 2, 3, 30):
        out = spec.generate(prompts, max_new_tokens=limit)
        cut = [ids[:limit] for ids in expected]
        assert out.token_ids == cut


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_trees_beyond_a_window(name: str) -> None:
    target = tiny(name)
    prompts = [torch.randint(0, 256, (n,)).tolist() for n in (40, 23)]
    spec = Speculator(target, make("hydra+ngram", target), Plan(4, nodes=9))
    assert spec.generate(prompts, max_new_tokens=24).token_ids == plain(target, prompts, 24)


@pytest.mark.parametrize(
    "fields", [{"depth": True}, {"nodes": True}, {"confidence": None}, {"worth": "x"}], ids=str
)
def test_bad_plans(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(fields))) as error:
        Speculator(tiny(), plan=Plan(**fields))
    assert len(str(error.value).splitlines()) == 2


FORKED = Plan(2, tree=((0,), (1,), (0, 0)))


@pytest.mark.parametrize(
    ("make_it", "follows"),
    [
        (lambda target: make_head("mtp", target.spec, modules="depth"), False),
        (lambda target: DraftModel(other(target), target), False),
        (lambda target: NGram(), False),
        (lambda target: Merged([NGram(), DraftModel(other(target), target)]), False),
        (lambda target: make_head("mtp", target.spec), True),
        (lambda target: Merged([NGram(), make_head("hydra", target.spec)]), True),
        (lambda target: script(target, max_depth=4), True),  # it does not say
    ],
    ids=["mtp-depth", "draft_model", "ngram", "merged-chains", "mtp", "merged", "custom"],
)
def test_a_tree_that_no_drafter_follows_is_told_of(make_it: Any, follows: bool) -> None:
    target = tiny()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Speculator(target, make_it(target), FORKED)
    assert any("plan.tree is ignored" in str(w.message) for w in told) != follows


def test_only_chosen_nodes_are_asked_for_below_their_worth() -> None:
    """Drafters that agree are believed more, which drawn nodes never do."""
    asked: list[float] = []

    class Watched(NGram):
        def propose(self, state: Any, root_B: Tensor, plan: Plan, *rest: Any) -> Any:
            asked.append(plan.worth)
            return super().propose(state, root_B, plan, *rest)

    hydra = make_head("hydra", tiny().spec)
    spec = Speculator(tiny(), Merged([Watched(), hydra]), Plan(3, nodes=7, worth=0.2))
    for sampled, worth in ((False, 0.1), (True, 0.2)):
        asked.clear()
        spec.generate(PROMPTS[0], max_new_tokens=6, do_sample=sampled)
        assert set(asked) == {worth}
