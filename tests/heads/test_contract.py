"""What every head kind keeps, whatever it is: one suite over `HEADS`.

A new kind is covered as soon as it is registered; `FIELDS` adds settings of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import decode_law, distance, memoised, target_law
from fixtures import PROMPTS, VOCAB, batch_of, double, make_head, micro, plain, tiny
from torch import Tensor

from selfdraft.heads import HEADS, Plan, load_head, save_head
from selfdraft.heads.base import Head
from selfdraft.inference.noise import RowNoise
from selfdraft.inference.sampling import RowSampling
from selfdraft.inference.settings import Settings
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel

COMMON: list[dict[str, Any]] = [
    {},
    {"taps": [0, 1, 2], "draft_ids": True},
    {"loss": "ce"},
    {"prior": 4, "draft_ids": True},
    {"low_rank": 8, "prior": 4, "loss": "lk"},
]
FIELDS: dict[str, list[dict[str, Any]]] = {
    "eagle": [
        {"lm_head": "own", "draft_ids": True},
        {"fusion": "fc", "taps": [0, 1, 2]},
        {"feature_loss": 2.0, "taps": []},
    ],
    "medusa": [
        {"lm_head": "own"},
        {"lm_head": "own", "draft_ids": True, "layers": 2},
        {"prefix_attention": True, "lm_head": "own"},
    ],
    "hydra": [
        {"layers": 1, "width": 24, "taps": [7]},
        {"prefix_attention": True, "taps": [1], "draft_ids": True},
    ],
    "mtp": [{"modules": "depth"}, {"modules": "depth", "taps": [1], "draft_ids": True}],
}
CASES = [(kind, fields) for kind in sorted(HEADS) for fields in COMMON + FIELDS.get(kind, [])]
DEPTH = 3
Make = Callable[..., Head]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1])]))
def make(request: pytest.FixtureRequest) -> Make:
    """Makes the head of the case on a target; its draft vocabulary is every third id, or all."""
    kind, fields = request.param[0], dict(request.param[1])
    some = fields.pop("draft_ids", False)

    def build(target: TargetModel, **more: Any) -> Head:
        ids = list(range(0, target.spec.vocab_size, 3)) if some else None
        return make_head(kind, target.spec, **({"depth": DEPTH, "draft_ids": ids} | fields | more))

    return build


def features_of(target: TargetModel, head: Head, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return target.features(batch["ids"], batch["length"], head.taps)


def test_loss_is_finite_and_only_the_head_learns(make: Make) -> None:
    target = double()  # its parameters could take gradients: no one asked for its freezing
    head, batch = make(target), batch_of([20, 13])
    assert all(p.requires_grad for p in target.model.parameters())
    sums = head(batch, features_of(target, head, batch))
    assert sums["loss"].shape == sums["top1"].shape == sums["prefix"].shape == (DEPTH,)
    assert sums["loss"].isfinite().all()
    assert (sums["loss"] > 0).all()
    (sums["loss"] * head.loss_weights() / head.counts(batch)).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for p in target.model.parameters())
    targets = {p.data_ptr() for p in target.model.parameters()}
    assert not targets & {p.data_ptr() for p in head.parameters()}


def test_an_empty_mask_gives_zero_sums_and_zero_gradients(make: Make) -> None:
    target, batch = tiny(), batch_of([20, 13])
    head = make(target)
    batch["loss_mask"][:] = False
    sums = head(batch, features_of(target, head, batch))
    assert head.counts(batch).tolist() == [0] * DEPTH
    assert sums["loss"].tolist() == [0.0] * DEPTH
    assert sums["top1"].tolist() == sums["prefix"].tolist() == [0] * DEPTH
    sums["loss"].sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_step_of_training_lowers_the_loss(make: Make) -> None:
    target, batch = tiny(), batch_of([40, 30])
    head = make(target, scale=0.02)
    features = features_of(target, head, batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    losses = []
    for _ in range(6):
        loss = (head(batch, features)["loss"] / head.counts(batch)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@torch.no_grad()
def test_training_features_are_decoding_features(make: Make) -> None:
    target, batch = tiny(), batch_of([20, 13])
    taps, ids = make(target).taps, batch["ids"]
    whole = target.features(ids, batch["length"], taps)
    cache = target.new_cache(2, 32)
    parts = [target.prefill(ids[:, :9], [9, 6], cache, taps)]
    chain = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    nodes = torch.stack([ids[0, 9:13], ids[1, 6:10]])
    parts.append(target.forward(nodes, cache, chain, None, taps))
    for name, expected in whole.items():
        scale = expected.abs().max()
        for row, start in enumerate([9, 6]):
            torch.testing.assert_close(
                torch.cat([parts[0][name][row, :start], parts[1][name][row]]) / scale,
                expected[row, : start + 4] / scale,
                rtol=0,
                atol=1e-5,
            )


@torch.no_grad()
def test_training_states_are_decoding_states(make: Make) -> None:
    """At each prefix, slot k's logits in training, on the text, are those of a decoding step."""
    target, batch = double(), batch_of([12, 9], prompt=1)
    head, ids = make(target), batch["ids"]
    features = features_of(target, head, batch)
    time, both = ids.shape[1], torch.arange(2)
    chosen = both * time + torch.tensor([3, 3])  # before the round; then two and three further on
    early = head.unroll(batch, features, [chosen] * DEPTH)
    late = head.unroll(batch, features, [chosen + torch.tensor([2, 3])] * DEPTH)
    length, count = torch.tensor([4, 4]), torch.tensor([2, 3])
    state = head.start(ids[:, :5], length, {name: f[:, :4] for name, f in features.items()})
    nodes = {name: f[:, 4:8] for name, f in features.items()}  # root, two accepted, one rejected
    after = head.advance(state, ids[:, 5:8], count, nodes)
    for now, read, expected in ((state, length, early), (after, length + count, late)):
        memo: dict[str, Tensor] = {}
        first = torch.zeros(2, 1, dtype=torch.long)
        for k in range(1, DEPTH + 1):
            path = torch.stack([ids[both, read + j] for j in range(k)], -1)[:, None]
            got = head.draft_logits(head.step(now, path, first, memo), path)
            wanted = head.draft_logits(expected[k - 1], path[:, 0])
            torch.testing.assert_close(got[:, 0], wanted)
            if k == 1:
                one = head.step(now.select(torch.tensor([1])), path[1:], first[1:], {})
                torch.testing.assert_close(head.draft_logits(one, path[1:]), got[1:])


@pytest.mark.parametrize("sampled", [False, True])
@torch.no_grad()
def test_draft_is_valid(make: Make, sampled: bool) -> None:
    target, batch = tiny(), batch_of([9, 9])
    head = make(target)
    length = torch.tensor([8, 6])
    state = head.start(batch["ids"], length, features_of(target, head, batch))
    history = [row[: n + 1] for row, n in zip(batch["ids"].tolist(), [8, 6], strict=True)]
    sampling = RowSampling(Settings(do_sample=sampled, top_k=5 if sampled else 0), history)
    root = torch.tensor([ids[-1] for ids in history])
    for depth in range(DEPTH + 3):
        draft = head.propose(state, root, Plan(depth), sampling, RowNoise([0, 1], [9, 7]))
        nodes = min(depth, DEPTH) + 1
        assert draft.ids_BN.shape == (2, nodes)
        assert draft.ids_BN[:, 0].equal(root)
        assert draft.is_chain
        assert draft.valid_BN.all()
        drafted = draft.ids_BN[:, 1:]
        assert ((drafted >= 0) & (drafted < VOCAB)).all()
        if head.draft_ids is not None:
            assert torch.isin(drafted, head.draft_ids).all()
        assert draft.drawn_BN[:, 1:].all() if sampled else not draft.drawn_BN.any()
        if sampled and nodes > 1:
            laws = draft.q_BNV[:, :-1]
            torch.testing.assert_close(laws.sum(-1), torch.ones(2, nodes - 1))
            # Equal values pass top-k together.
            assert all(len(law_V[law_V > 0].unique()) <= 5 for law_V in laws.flatten(0, 1))
            assert (laws.gather(2, drafted[..., None]) > 0).all()


def test_save_and_load_give_the_same_draft(make: Make, tmp_path: Path) -> None:
    target = tiny()
    head = make(target)
    save_head(tmp_path, head)
    again = load_head(tmp_path, target.spec)
    for settings in ({}, {"do_sample": True, "seed": 3}):
        runs = [
            Speculator(target, h).generate(PROMPTS, max_new_tokens=12, **settings)
            for h in (head, again)
        ]
        assert runs[0].token_ids == runs[1].token_ids
        assert runs[0].stats.accepted_by_depth == runs[1].stats.accepted_by_depth


def test_greedy_output_is_the_plain_one(make: Make) -> None:
    target = tiny()
    out = Speculator(target, make(target)).generate(PROMPTS, max_new_tokens=24)
    assert out.token_ids == plain(target, PROMPTS, 24)


def test_sampled_law_is_exact(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loop on a target of 3 tokens, one of them EOS, two drafted tokens a round."""
    target = memoised(micro(3))
    head = make(target, depth=2, scale=0.5)
    got = decode_law(monkeypatch, target, head, [[1, 0]], max_new_tokens=4)
    expected = target_law(target, [[1, 0]], 4)
    assert len(expected) > 20
    assert distance(got, expected) < 1e-12
