"""Where rows end early, stand in other places, or fill the target's positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import EOS, PROMPTS, TARGETS, VOCAB, double, make_head, plain, stock, tiny
from transformers import GenerationConfig, StoppingCriteria

from selfdraft.heads import Plan
from selfdraft.heads.errors import InputError
from selfdraft.inference.drafters import Merged
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

LENGTHS = [190, 1, 33, 2, 64, 31, 1]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def speculator(target: TargetModel, **fields: Any) -> Speculator:
    head = make_head("hydra", target.spec, scale=0.05, prior=2, draft_ids=list(range(0, VOCAB, 3)))
    head.widen = True
    return Speculator(target, Merged([NGram(), head]), Plan(5, nodes=8, **fields))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_does_not_depend_on_where_it_stands(sampled: bool) -> None:
    """Batches in every order, rows of equal prompts, several sequences a prompt."""
    spec, prompts = speculator(double()), prompts_of(LENGTHS)
    prompts.append(prompts[2])
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": sampled, "temperature": 0.8}
    seeds = [100 + i for i in range(len(prompts))]
    expected = spec.generate(prompts, seed=seeds, **settings).token_ids
    assert not sampled or expected[2] != expected[-1]  # one prompt, two seeds
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 7, 1, 6, 4, 2, 5]):
        for size in (32, 3):
            out = spec.generate(
                [prompts[i] for i in order],
                seed=[seeds[i] for i in order],
                batch_size=size,
                **settings,
            )
            assert out.token_ids == [expected[i] for i in order]
    several = spec.generate(prompts[:3], seed=7, num_return_sequences=2, **settings).token_ids
    for row, ids in enumerate(several):
        alone = spec.generate(prompts[row // 2], seed=7 + row, **settings)
        assert alone.token_ids == [ids]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("make", [Speculator, speculator])
def test_rows_that_end_in_the_prefill(make: Any, sampled: bool) -> None:
    target = double()
    first = plain(target, PROMPTS, 1)
    target.eos_ids = {first[1][0]}
    out = make(target).generate(PROMPTS, max_new_tokens=1, do_sample=sampled)
    assert [len(ids) for ids in out.token_ids] == [1] * 4
    assert out.stats.rounds == 0 and out.stats.tokens == 4
    if not sampled:
        reasons = ["eos" if ids[0] in target.eos_ids else "length" for ids in first]
        assert (out.token_ids, out.finish_reasons) == (first, reasons)
        longer = make(target).generate(PROMPTS, max_new_tokens=9)
        assert longer.token_ids == plain(target, PROMPTS, 9)
        assert longer.token_ids[1] == first[1]
        forced = make(target).generate(PROMPTS, max_new_tokens=9, min_new_tokens=4)
        assert (
            forced.token_ids
            == Speculator(target).generate(PROMPTS, max_new_tokens=9, min_new_tokens=4).token_ids
        )
        assert min(map(len, forced.token_ids)) >= 4
        assert all(target.eos_ids.isdisjoint(ids[:4]) for ids in forced.token_ids)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompts_that_fill_the_positions(name: str, sampled: bool) -> None:
    target = double(name)
    positions = target.spec.max_positions
    prompts = prompts_of([positions - 1, positions - 2, 3, positions - 6])
    out = speculator(target).generate(prompts, max_new_tokens=20, do_sample=sampled, seed=2)
    for ids, reason, most in zip(out.token_ids, out.finish_reasons, [1, 2, 20, 6], strict=True):
        assert len(ids) == most or (len(ids) < most and reason == "eos")
    assert out.finish_reasons[0] in ("positions", "eos")
    if not sampled:
        assert out.token_ids == plain(target, prompts, 20)
        model = target.model
        ids = torch.tensor([prompts[1]])
        theirs = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=EOS)
        assert theirs[0, len(prompts[1]) :].tolist() == out.token_ids[1]


def test_stop_strings_across_drafted_tokens() -> None:
    """The token that completes one is the last, wherever a round's draft ends."""
    prompts = prompts_of(LENGTHS)
    texts = Speculator(tiny()).generate(prompts, max_new_tokens=30).texts
    stops = [text[4:7] for text in texts if len(text) > 9 and "\ufffd" not in text[4:7]]
    assert stops
    settings: dict[str, Any] = {"max_new_tokens": 30, "stop_strings": stops}
    expected = Speculator(tiny()).generate(prompts, **settings)
    assert "stop" in expected.finish_reasons
    for plan in (Plan(1), Plan(5, nodes=8), Plan(9)):
        head = make_head("hydra", tiny().spec, scale=0.05)
        out = Speculator(tiny(), Merged([NGram(), head]), plan).generate(prompts, **settings)
        assert (out.token_ids, out.texts, out.finish_reasons) == (
            expected.token_ids,
            expected.texts,
            expected.finish_reasons,
        )


def test_several_ends_of_sequence() -> None:
    model = stock(TARGETS["llama"])
    first = plain(tiny(), PROMPTS, 12)
    ends = sorted({first[0][3], first[1][6], first[2][0]})
    model.generation_config.eos_token_id = ends
    target = TargetModel(model)
    out = speculator(target).generate(PROMPTS, max_new_tokens=12)
    for ids, whole, reason in zip(out.token_ids, first, out.finish_reasons, strict=True):
        end = next((i for i, token in enumerate(whole) if token in ends), None)
        assert ids == whole[: 12 if end is None else end + 1]
        assert reason == ("length" if end is None else "eos")


class Watch(StoppingCriteria):
    """Keeps what it is asked about, and never stops."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_stopping_criteria_see_each_token_come() -> None:
    model = stock(TARGETS["llama"])
    watches, spec = (Watch(), Watch()), speculator(TargetModel(model))
    for watch, own in zip(watches, ({}, {"custom_generate": spec}), strict=True):
        ids = torch.tensor([PROMPTS[1]])
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": EOS}
        model.generate(ids, **settings, **own, stopping_criteria=[watch])
    assert watches[0].seen == watches[1].seen and len(watches[0].seen) == 12


def test_the_models_own_defaults_reach_custom_generate_alone() -> None:
    """A generation_config's penalties hold in `model.generate`, with this drafter or without."""
    model = stock(TARGETS["llama"])
    model.generation_config = GenerationConfig(
        repetition_penalty=1.5, no_repeat_ngram_size=2, eos_token_id=EOS, pad_token_id=EOS
    )
    spec = speculator(TargetModel(model))
    ids = torch.tensor([PROMPTS[1]])
    arguments: dict[str, Any] = {"inputs": ids, "max_new_tokens": 16, "do_sample": False}
    theirs = model.generate(**arguments)
    assert model.generate(**arguments, custom_generate=spec).tolist() == theirs.tolist()
    asked = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    ours = spec.generate(PROMPTS[1], max_new_tokens=16, **asked).token_ids[0]
    assert theirs[0, len(PROMPTS[1]) :].tolist() == ours
    assert spec.generate(PROMPTS[1], max_new_tokens=16).token_ids == plain(tiny(), [PROMPTS[1]], 16)


def test_a_fixed_tree_is_drafted_to_its_end_or_that_is_said() -> None:
    target, heads = tiny(), {}
    tree = tuple((0,) * length for length in range(1, 7))
    for depth in (5, 6):
        heads[depth] = make_head("hydra", target.spec, depth=depth)
    with pytest.raises(InputError, match=r"plan\.tree is 6 deep, plan\.depth is 4\nGive depth=6"):
        Speculator(target, heads[6], Plan(tree=tree))
    spec = Speculator(target, heads[6], Plan(6, tree=tree))
    assert len(spec.generate(PROMPTS[0], max_new_tokens=24).stats.drafted_by_depth) == 6
    with pytest.warns(UserWarning, match="a draft of 6 tokens was asked for, hydra drafts 5"):
        Speculator(target, heads[5], Plan(6, tree=tree))
    with pytest.warns(UserWarning, match=r"plan\.tree is 6 deep, .* drafts 5 of it: cut to 5"):
        Speculator(target, Merged([NGram(), heads[5]]), Plan(6, tree=tree))
