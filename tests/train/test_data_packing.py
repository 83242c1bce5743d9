"""Packing and bucketing are layout: the same documents, the same loss, the same gradient."""

import numpy as np
import pytest
import torch
from training import documents, make_config, make_target, metrics, train

from selfdraft.heads import HEADS
from selfdraft.train.features import OnlineFeatures
from selfdraft.train.packing import collate, collate_features, order, places, row_order
from selfdraft.train.step import Batches

LENGTHS = [9, 24, 12, 17, 30, 9, 11, 20]


def test_places_are_disjoint_and_within_the_row():
    rows = documents(LENGTHS)
    found = places(rows, 40)
    taken = {
        (row, start + i) for (row, start), n in zip(found, LENGTHS, strict=True) for i in range(n)
    }
    assert len(taken) == sum(LENGTHS) and max(place for _, place in taken) < 40
    assert 1 + max(row for row, _ in found) == 4  # 132 tokens in rows of 40
    assert places(rows, None) == [(row, 0) for row in range(8)]
    assert places(rows[4:5], 20) == [(0, 0)]  # a document longer than a row has one of its own


def test_a_packed_batch_holds_each_document_at_its_place():
    rows = documents(LENGTHS)
    batch = collate(rows, pad_id=7, pack=40)
    for number, ((row, start), document) in enumerate(zip(places(rows, 40), rows, strict=True)):
        span = slice(start, start + len(document.ids))
        assert batch["ids"][row, span].tolist() == document.ids
        assert batch["loss_mask"][row, span].tolist() == document.loss_mask
        assert batch["position"][row, span].tolist() == list(range(len(document.ids)))
        assert (batch["document"] == number).sum() == len(document.ids)
        assert (batch["document"][row, span] == number).all()
    padding = batch["document"] < 0
    assert (batch["ids"][padding] == 7).all() and not batch["loss_mask"][padding].any()
    assert (batch["length"] == (~padding).sum(1)).all()


def test_features_go_where_the_tokens_go():
    rows = documents(LENGTHS)
    found = [{"hidden": torch.tensor(d.ids)[:, None]} for d in rows]
    batch = collate(rows, pack=40)
    laid = collate_features(found, places(rows, 40))["hidden"][..., 0]
    assert torch.equal(laid, batch["ids"])


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_packed_equals_unpacked(kind):
    target, rows = make_target(), documents(LENGTHS)
    config = HEADS[kind].Config(kind=kind, depth=3, taps=[1, 2], draft_vocab=None)
    torch.manual_seed(3)
    head = HEADS[kind](config, target.spec)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    results = []
    for pack in (None, 64):
        source = OnlineFeatures(target, head.taps, "float32", pack)
        batch = source.collate(rows)
        head.zero_grad()
        out = head(batch, source.get(rows))
        out["loss"].sum().backward()
        grads = [p.grad.clone() for p in head.parameters()]
        results.append([out["loss"].detach(), out["prefix"], head.counts(batch), *grads])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    assert results[0][0].min() > 0 and len(batch["ids"]) < len(rows)


def test_a_packed_run_is_the_unpacked_run(tmp_path):
    for name, pack in (("plain", False), ("packed", True)):
        (tmp_path / name).mkdir()
        train(make_config(tmp_path / name, data={"pack": pack}))
    lines = [metrics(tmp_path / name / "run") for name in ("plain", "packed")]
    for plain, packed in zip(*lines, strict=True):
        for key in {"rows", "loss", "grad_norm", "tau"} & plain.keys():
            assert packed[key] == pytest.approx(plain[key], rel=1e-4), key
        if "eval" in plain:
            assert packed["eval"]["loss"] == pytest.approx(plain["eval"]["loss"], rel=1e-4)


# -- order ---------------------------------------------------------------------------------------


def lengths_of(count):
    dice = np.random.default_rng(0)
    return dice.integers(8, 200, count).tolist()


def test_bucketed_order_is_a_permutation_by_seed_and_epoch_alone():
    rows = documents(lengths_of(1000))
    first = row_order(rows, 3, 1, 8)
    assert sorted(first) == list(range(1000))
    assert np.array_equal(first, row_order(rows, 3, 1, 8))
    assert not np.array_equal(first, row_order(rows, 3, 2, 8))
    assert not np.array_equal(first, row_order(rows, 4, 1, 8))
    assert np.array_equal(row_order(rows, 3, 1), order(3, 1, 1000))


def test_buckets_save_padding_and_stay_mixed():
    sizes = lengths_of(2000)
    rows = documents(sizes)

    def padded(found):
        batches = [[sizes[i] for i in found[b : b + 8]] for b in range(0, 2000, 8)]
        return sum(8 * max(batch) for batch in batches)

    found = row_order(rows, 0, 0, 8)
    assert padded(found) < 1.1 * sum(sizes) < 1.5 * sum(sizes) < padded(order(0, 0, 2000))
    means = [np.mean([sizes[i] for i in found[b : b + 200]]) for b in range(0, 2000, 200)]
    assert max(means) - min(means) < 40  # no drift from short to long


def test_one_stream_for_every_split_of_bucketed_rows():
    rows = documents(lengths_of(37))
    wide = Batches(rows, 5, 6, 1, 1, bucket=4)
    deep = Batches(rows, 5, 1, 3, 2, bucket=4)
    assert all(wide.rows(step) == deep.rows(step) for step in range(20))
