"""Which input, label and teacher each loss row has, against a direct loop over the definitions.

Slot k at row t reads h_t (Medusa) or [h_t; e(x_{t+1}); ..; e(x_{t+k})] (Hydra), is x_{t+1+k}, is
taught by p_{t+k}, and counts where the target generated all of x_{t+1}, .., x_{t+1+k}.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from fixtures import LLAMA, batch_of, make_head, stock
from torch import Tensor

from selfdraft.heads.base import Head
from selfdraft.heads.losses import loss_rows
from selfdraft.inference.target import TargetModel

DEPTH = 3


@cache
def target() -> TargetModel:
    """So few tokens that a random head hits some."""
    return TargetModel(stock(LLAMA | {"vocab_size": 4, "eos_token_id": 3}, dtype=torch.float64))


def packed_batch() -> dict[str, Tensor]:
    """Rows of two documents each, with padding and holes in the mask."""
    batch = batch_of([60, 37, 9], prompt=4, vocab=4)
    batch["document"] = torch.zeros_like(batch["ids"])
    batch["document"][0, 11:] = 1
    batch["document"][1, 5:] = 1
    batch["loss_mask"][0, 18] = False
    batch["loss_mask"][0, 11:13] = False
    return batch


def medusa_state(head: Head, embed: Callable, h_TD: Tensor, x_T: Tensor, t: int, k: int) -> Tensor:
    return head.blocks[k - 1](h_TD[t])


def hydra_state(head: Head, embed: Callable, h_TD: Tensor, x_T: Tensor, t: int, k: int) -> Tensor:
    tokens = [head.embed_norm(embed(x_T[t + j])) for j in range(1, k + 1)]
    return h_TD[t] + head.mlps[k - 1](head.hidden_norm(h_TD[t]), torch.cat(tokens))


STATES = {"medusa": medusa_state, "hydra": hydra_state}


def direct(kind: str, head: Head, batch: dict[str, Tensor], loss: str) -> dict[str, list[float]]:
    """Sums by a loop over rows, positions and depths, on transformers' own outputs."""
    model = target().model
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    sums = {name: [0.0] * DEPTH for name in ("loss", "count", "top1", "prefix")}
    for x_T, a_T, doc_T in zip(batch["ids"], batch["loss_mask"], batch["document"], strict=True):
        output = model.model(input_ids=x_T[None])
        h_TD = output.last_hidden_state[0]
        p_TV = lm_head(h_TD).softmax(-1)
        for t in range(len(x_T)):
            all_hit = True
            for k in range(1, DEPTH + 1):
                span = range(t + 1, t + 2 + k)
                if span[-1] >= len(x_T) or not all(a_T[i] and doc_T[i] == doc_T[t] for i in span):
                    break
                state = STATES[kind](head, embed, h_TD, x_T, t, k)
                log_q = lm_head(state).log_softmax(-1)
                p, label = p_TV[t + k], x_T[t + 1 + k]
                value = (p * (p.log() - log_q)).sum() if loss == "kl" else -log_q[label]
                hit = bool(log_q.argmax() == label)
                all_hit = all_hit and hit
                for name, amount in (("loss", float(value)), ("count", 1), ("top1", hit)):
                    sums[name][k - 1] += amount
                sums["prefix"][k - 1] += all_hit
    return sums


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("kind", STATES)
@torch.no_grad()
def test_head_sums_equal_a_direct_loop(kind: str, loss: str) -> None:
    head, batch = make_head(kind, target().spec, depth=DEPTH, loss=loss), packed_batch()
    features = target().features(batch["ids"], batch["length"], [])
    got, expected = head(batch, features), direct(kind, head, batch, loss)
    assert head.counts(batch).tolist() == expected["count"]
    torch.testing.assert_close(got["loss"].tolist(), expected["loss"], rtol=1e-9, atol=1e-9)
    assert got["top1"].tolist() == expected["top1"]
    assert got["prefix"].tolist() == expected["prefix"]
    assert expected["prefix"][1] > 0
    assert expected["top1"] != expected["prefix"]


@torch.no_grad()
def test_a_fresh_medusa_repeats_the_targets_law() -> None:
    """So where every h_t is one state and the text is its argmax, each row is a hit."""
    target_, batch = target(), batch_of([12, 8], prompt=2, vocab=4)
    head = make_head("medusa", target_.spec, depth=DEPTH, scale=0.0)
    hidden = target_.features(batch["ids"], batch["length"], [])["hidden"]
    best = target_.logits(hidden[0, 5]).argmax()
    batch["ids"][:] = best
    got = head(batch, {"hidden": hidden[0, 5].expand(2, 12, -1)})
    assert got["top1"].tolist() == got["prefix"].tolist() == head.counts(batch).tolist()
    assert got["loss"].abs().max() < 1e-12  # teacher and student are one law here


def test_first_row_is_the_last_prompt_token_and_the_tail_is_dropped() -> None:
    batch = batch_of([10], prompt=3)
    rows = [r.tolist() for r in loss_rows(batch, 4)]
    assert rows == [list(range(2, 8)), list(range(2, 7)), list(range(2, 6)), list(range(2, 5))]


def test_rows_never_cross_a_border() -> None:
    """Neither the end of a row, nor padding, nor a document's border: the mask is all true."""
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False  # padding
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
    batch = {"ids": torch.zeros(2, 8), "loss_mask": mask, "document": document}
    one, two = (r.tolist() for r in loss_rows(batch, 2))
    assert one == [0, 3, 4, 5, 8, 9, 10]
    assert two == [3, 4, 8, 9]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_rows_too_short_to_learn_from(length: int) -> None:
    batch = batch_of([length], prompt=0)
    assert [len(r) for r in loss_rows(batch, 3)] == [max(0, length - 2), 0, 0]


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    batch, head = batch_of([14, 9], prompt=3, vocab=4), make_head("hydra", target().spec)
    wide = {
        name: torch.nn.functional.pad(value, (0, 6)) if value.ndim > 1 else value
        for name, value in batch.items()
    }
    results = [head(b, target().features(b["ids"], b["length"], [])) for b in (batch, wide)]
    torch.testing.assert_close(results[0]["loss"], results[1]["loss"], rtol=1e-9, atol=1e-9)
    assert head.counts(batch).equal(head.counts(wide))


def test_loss_weights_are_powers_of_the_decay() -> None:
    head = make_head("medusa", target().spec, decay=0.8)
    torch.testing.assert_close(head.loss_weights(), torch.tensor([0.8, 0.64, 0.512]))
