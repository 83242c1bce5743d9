"""Rows of unlike numbers of draft nodes: the padding is left out, and the states are the same."""

from typing import Any

import pytest
import torch
from fixtures import CLOSE, LLAMA, PROMPTS, batch_of, plain, stock, tiny
from transformers import AttentionInterface

from selfdraft.heads.draft import Draft
from selfdraft.inference import attention
from selfdraft.inference.drafters import Plain
from selfdraft.inference.ngram import NGram
from selfdraft.inference.ragged import Ragged, ragged
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

FAMILIES = ["llama", "tied", "qwen3", "mistral", "granite", "gpt2"]
IDS = [[3, 9, 4, 7, 5], [6], [8, 2, 2]]
PARENTS = [[-1, 0, 0, 1, 3], [-1], [-1, 0, 1]]


def test_tokens_are_closed_up_and_laid_out_again() -> None:
    valid_BN = torch.tensor([[True, True, False], [True, False, False]])
    layout, x_BND = Ragged(valid_BN), torch.arange(12.0).view(2, 3, 2)
    closed = layout.close(x_BND)
    assert closed.tolist() == [[[0, 1], [2, 3], [6, 7]]]
    assert torch.equal(layout.open(closed), x_BND * valid_BN[..., None])
    heads = closed[:, None].expand(1, 4, 3, 2)
    assert torch.equal(layout.open_heads(heads)[:, 3], x_BND * valid_BN[..., None])


def test_rows_of_one_length_are_left_as_they_are() -> None:
    assert ragged(torch.ones(2, 3, dtype=torch.bool), torch.device("cpu")) is None
    assert ragged(None, torch.device("cpu")) is None


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_states_of_ragged_trees_are_those_of_padded_ones(name: str) -> None:
    """Behind prompts longer and shorter than a window; the decoder sees no padding, and what it
    left in the cache gives the next forward the same states."""
    target, lengths = tiny(name), [37, 8, 20]
    assert target.ragged
    batch, draft = batch_of(lengths), Draft.points(IDS, PARENTS)
    seen: list[tuple[int, ...]] = []
    hook = target.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    found: list[dict[str, torch.Tensor]] = []
    for valid_BN in (draft.valid_BN, None):
        cache = target.new_cache(3, 64)
        target.prefill(batch["ids"], lengths, cache, [])
        taps = [0, 2]
        tree = draft.ids_BN, cache, draft.ancestors(), draft.depth_BN(), taps, valid_BN
        first = target.forward(*tree)
        cache.keep([[0, 1, 3], [0], [0, 1]])
        chain = Draft.chain(torch.tensor([[5], [6], [7]]))
        second = target.forward(chain.ids_BN, cache, chain.ancestors(), None, taps)
        found.append(first | {f"next {key}": value for key, value in second.items()})
    hook.remove()
    assert (1, 9) in seen and (3, 5) in seen
    for key, value in found[0].items():
        valid = draft.valid_BN if value.shape[1] == 5 else torch.ones(3, 1, dtype=torch.bool)
        scale = value[valid].abs().max()
        torch.testing.assert_close(
            value[valid] / scale, found[1][key][valid] / scale, **CLOSE[target.dtype]
        )


@pytest.mark.parametrize("drafter", [NGram(), Plain()])
def test_text_does_not_depend_on_the_layout(drafter: Any, monkeypatch) -> None:
    target, prompts = tiny("llama"), [[*ids, *ids] for ids in PROMPTS]
    spec = Speculator(target, drafter)
    texts = [spec.generate(prompts, max_new_tokens=24, batch_size=len(prompts)).token_ids]
    monkeypatch.setattr(target, "ragged", False)
    texts.append(spec.generate(prompts, max_new_tokens=24, batch_size=len(prompts)).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.3, "top_k": 20}], ids=str
)
def test_sampled_rows_are_what_they_are_alone(settings: dict[str, Any]) -> None:
    """In float64, where no rounding hides a row's noise or laws that went to another row."""
    target = TargetModel(stock(LLAMA, dtype=torch.float64), pack=True)
    assert target.ragged
    prompts = [[*ids, *ids] for ids in PROMPTS]
    spec = Speculator(target, NGram())
    settings = {"do_sample": True, "max_new_tokens": 24} | settings
    together = spec.generate(prompts, seed=5, batch_size=len(prompts), **settings).token_ids
    alone = [spec.generate(p, seed=5 + i, **settings).token_ids for i, p in enumerate(prompts)]
    assert together == [ids[0] for ids in alone]


def test_the_lm_head_reads_no_padding(monkeypatch) -> None:
    """Each round of a row reads its root and its drafts, the prefill each row's last token."""
    target, shapes = tiny("llama"), []
    right = target.logits
    monkeypatch.setattr(target, "logits", lambda x: shapes.append(x.shape) or right(x))
    prompts = [[*ids, *ids] for ids in PROMPTS]
    stats = Speculator(target, NGram()).generate(prompts, max_new_tokens=24, batch_size=4).stats
    drafted = sum(stats.drafted_by.values())
    assert drafted > 0 and all(len(shape) == 2 for shape in shapes)
    assert sum(shape[0] for shape in shapes) == len(prompts) + stats.rounds + drafted


def test_a_family_that_hides_the_layout_keeps_its_padding(monkeypatch) -> None:
    """The probe at load finds out, and generation goes on with padded rows."""
    right = attention.grouped_attention

    def forgetful(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        return right(module, q, k, v, None if mask is None else mask.clone(), **more)

    monkeypatch.setattr(attention, "grouped_attention", forgetful)
    try:
        target = tiny.__wrapped__("llama")  # a new one
        assert not target.ragged
        prompts = [[3, 9, 4], [5, 6, 7, 8, 9, 1, 2]]
        out = Speculator(target, NGram()).generate(prompts, max_new_tokens=8, batch_size=2)
        assert out.token_ids == plain(tiny("llama"), prompts, 8)
    finally:
        AttentionInterface.register(attention.NAME, right)
