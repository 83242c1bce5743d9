"""What a processed law rules out: no child is drafted there, and no custom processor is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from enumeration import decode_law, distance, target_law
from fixtures import PROMPTS, VOCAB, make_head, plain, tiny
from tables import TableTarget
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as theirs

from selfdraft.heads import Draft, InputError, Plan
from selfdraft.inference.drafters import Merged, NoState
from selfdraft.inference.ngram import NGram
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.warpers import faster

TREE = ((0,), (1,), (0, 0), (0, 1))


@dataclass
class Always:
    """Proposes one chain of points, always."""

    tokens: list[int]
    name: str = "always"
    taps: list[int] = field(default_factory=list)

    @property
    def max_depth(self) -> int:
        return len(self.tokens)

    def start(self, *arguments: Any) -> NoState:
        return NoState()

    def advance(self, state: NoState, *arguments: Any) -> NoState:
        return state

    def propose(
        self, state: NoState, root_B: Tensor, plan: Plan, sampling: Any, noise: Any
    ) -> Draft:
        more = torch.tensor(self.tokens[: plan.depth], dtype=torch.long).expand(len(root_B), -1)
        return Draft.chain(torch.cat([root_B[:, None], more], 1))


class Banned(LogitsProcessor):
    """Bans a token, and knows no prefix that holds it among the new ones."""

    def __init__(self, token: int, prompt: int) -> None:
        self.token, self.prompt = token, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.token in input_ids[0, self.prompt :].tolist():
            raise KeyError(f"no such state: {input_ids.tolist()}")
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores


class Alternating(LogitsProcessor):
    """Every other prefix bans all ids but `left`: a small draft vocabulary is banned whole."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] % 2:
            return scores
        result = torch.full_like(scores, -torch.inf)
        result[:, self.left] = scores[:, self.left]
        return result


class NothingAfter(LogitsProcessor):
    """No token may follow a prefix of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forbidden = input_ids.shape[1] == self.length
        return torch.full_like(scores, -torch.inf) if forbidden else scores


WARPERS: list[dict[str, Any]] = [
    {},
    {"top_h": 0.6},
    {"eta_cutoff": 0.001},
    {"epsilon_cutoff": 0.01},
    {"top_p": 0.9},
    {"typical_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 2},
]


@pytest.mark.parametrize("more", WARPERS, ids=lambda s: "-".join(s) or "plain")
@pytest.mark.parametrize("banned", [[3, 5], [3]], ids=str)
@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_a_draft_vocabulary_banned_whole(kind: str, banned: list[int], more: dict) -> None:
    head = make_head(kind, tiny().spec, draft_ids=[3, 5], scale=0.1)
    settings = {"max_new_tokens": 8, "do_sample": True, "suppress_tokens": banned, **more}
    for plan in (Plan(3), Plan(2, tree=TREE)):
        out = Speculator(tiny(), head, plan).generate(PROMPTS, **settings)
        assert not set(banned) & {token for row in out.token_ids for token in row}
        drafted = sum(out.stats.drafted_by.values())
        assert drafted == 0 if banned == [3, 5] else drafted > 0


def test_a_vocabulary_banned_in_part_gives_no_children_that_cannot_be() -> None:
    """With one id left a tree of six nodes is a chain of that id."""
    head = make_head("hydra", tiny().spec, depth=2, scale=0.1)
    settings = {"max_new_tokens": 9, "suppress_tokens": [i for i in range(VOCAB) if i != 3]}
    out = Speculator(tiny(), head, Plan(2, nodes=6)).generate(PROMPTS[0], **settings)
    assert out.token_ids == [[3] * 9]
    assert out.stats.drafted_by["hydra"] == out.stats.accepted_by["hydra"] > 0


@pytest.mark.parametrize("make", [theirs.TopHLogitsWarper, theirs.EtaLogitsWarper])
def test_laws_are_warped_and_the_rest_is_left(make: Any) -> None:
    scores = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 3
    scores[1], scores[2, 4] = -torch.inf, torch.nan
    warper = make(0.3)
    got, whole = faster(warper)(None, scores), [0, 3]
    assert torch.equal(got[whole], warper(None, scores[whole]))
    assert torch.equal(got[1:3].nan_to_num(), scores[1:3].nan_to_num())
    assert torch.equal(faster(warper)(None, scores[1:2]), scores[1:2])


@pytest.mark.parametrize("more", [{}, {"top_h": 0.9}, {"eta_cutoff": 0.2}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("plan", [Plan(2), Plan(2, tree=TREE)], ids=["chain", "tree"])
@pytest.mark.parametrize("ngram", [False, True])
def test_the_law_stays_exact(
    plan: Plan, ngram: bool, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a processor bans a draft vocabulary of two whole, and where it fails on a draft."""
    target, prompt = TableTarget(4, 6), [1, 2, 1]
    drafter: Any = make_head("hydra", target.spec, depth=2, scale=0.5, draft_ids=[0, 3])
    drafter = Merged([NGram(max_depth=2), drafter]) if ngram else drafter
    rules = [Alternating(1), Banned(2, len(prompt))]
    names = {"top_h": theirs.TopHLogitsWarper, "top_k": theirs.TopKLogitsWarper}
    warpers = [theirs.TemperatureLogitsWarper(4.0)]
    warpers += [names.get(n, theirs.EtaLogitsWarper)(value) for n, value in more.items()]

    def law(logits_V: Tensor, ids: list[int]) -> Tensor:
        scores = logits_V[None].clone()
        for processor in [*rules, *warpers]:
            scores = processor(torch.tensor([ids]), scores)
        return scores[0].softmax(-1)

    settings = {"logits_processor": rules, "seed": [7], "temperature": 4.0, **more}
    got = decode_law(
        monkeypatch, target, drafter, [prompt], max_new_tokens=3, plan=plan, **settings
    )
    expected = target_law(target, [prompt], 3, law)
    assert len(expected) > 3
    assert distance(got, expected) < 1e-12


@pytest.mark.parametrize(
    ("sampled", "more"),
    [(False, {}), *((True, more) for more in WARPERS)],
    ids=lambda s: "-".join(s) if isinstance(s, dict) else "sampled" if s else "greedy",
)
def test_custom_processors_see_possible_prefixes_alone(sampled: bool, more: dict) -> None:
    rows = [PROMPTS[0], PROMPTS[1]]
    rule = Banned(8, 0)  # no prompt holds token 8
    settings: dict[str, Any] = {"max_new_tokens": 6, "logits_processor": [rule]}
    settings |= {"do_sample": sampled, **more}
    expected = Speculator(tiny()).generate(rows, **settings).token_ids
    for drafter in (Always([8, 9, 9]), Merged([Always([8, 9]), make_head("hydra", tiny().spec)])):
        out = Speculator(tiny(), drafter).generate(rows, **settings)
        assert [len(row) for row in out.token_ids] == [6, 6]
        assert sampled or out.token_ids == expected


class Seen(LogitsProcessor):
    """Keeps the prefixes that it is asked about."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        return scores


def test_greedy_asks_along_the_answer_alone() -> None:
    seen, prompt = Seen(), PROMPTS[0]
    drafter = Always([1, 2, 3, 4])
    out = Speculator(tiny(), drafter).generate(prompt, max_new_tokens=10, logits_processor=[seen])
    text = prompt + out.token_ids[0]
    assert out.token_ids == plain(tiny(), [prompt], 10)
    assert seen.prefixes and all(text[: len(p)] == p for p in seen.prefixes)


@pytest.mark.parametrize(
    "drafter", [None, Always([7, 9]), "hydra"], ids=["plain", "points", "head"]
)
def test_no_token_left_is_an_error_with_a_draft_too(drafter: Any) -> None:
    drafter = make_head("hydra", tiny().spec) if drafter == "hydra" else drafter
    settings = {"do_sample": True, "logits_processor": [NothingAfter(4)]}
    with pytest.raises(InputError, match="no token"):
        Speculator(tiny(), drafter).generate([1, 2, 3], max_new_tokens=4, **settings)


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 5:
            raise RuntimeError("broken")
        return scores


@pytest.mark.parametrize("sampled", [False, True])
def test_a_processor_that_fails_where_the_text_comes_is_told(sampled: bool) -> None:
    drafter = make_head("hydra", tiny().spec)
    settings = {"do_sample": sampled, "logits_processor": [Broken()]}
    with pytest.raises(RuntimeError, match="broken"):
        Speculator(tiny(), drafter).generate([1, 2, 3], max_new_tokens=8, **settings)
