"""One step is exact however it is split, the target stays frozen, and bad numbers stay out."""

import hashlib
import json
import math

import pytest
import torch
from safetensors import safe_open
from training import documents, make_config, make_double, make_target, metrics, random_head, train

from selfdraft.heads import HEADS, Head, load_head
from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.train import setup, trainer
from selfdraft.train.config import OptimConfig, load_config
from selfdraft.train.data import load_documents
from selfdraft.train.engine import Engine
from selfdraft.train.evaluate import evaluate, measure
from selfdraft.train.features import OnlineFeatures
from selfdraft.train.packing import Document, collate
from selfdraft.train.step import Batches, Stepper, learning_rate

LENGTHS = [9, 24, 12, 17, 30, 9, 11, 20]


def losses(head: Head, target: TargetModel, rows: list[Document]) -> torch.Tensor:
    """[rows, depth] sums of each row, computed in one batch: the others' masks are emptied."""
    features = OnlineFeatures(target, head.taps, "float32").get(rows)
    found = []
    for b in range(len(rows)):
        batch = collate(rows)
        batch["loss_mask"][torch.arange(len(rows)) != b] = False
        found.append(head(batch, features)["loss"].detach())
    return torch.stack(found)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_a_row_loses_the_same_alone_padded_reordered_and_again(target, kind):
    """T9."""
    head, rows = random_head(target, kind), documents([9, 30, 14, 21])
    batched = losses(head, target, rows)
    alone = torch.cat([losses(head, target, [row]) for row in rows])
    reordered = losses(head, target, rows[::-1]).flip(0)
    again = losses(head, target, rows)
    for other in (alone, reordered, again):
        torch.testing.assert_close(other, batched, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_padding_changes_neither_loss_nor_gradient(target, kind):
    """T2: four times the length in padding; prompt tokens that carry no loss are not counted."""
    head, (row,) = random_head(target, kind), documents([12])
    batch, features = collate([row]), OnlineFeatures(target, head.taps, "float32").get([row])
    longer = {k: torch.nn.functional.pad(v, (0, 36)) for k, v in batch.items() if k != "length"}
    padded = {
        name: torch.nn.functional.pad(v, (0, 0) * (v.dim() - 2) + (0, 36))
        for name, v in features.items()
    }
    results = []
    for inputs in ((batch, features), (longer, padded)):
        head.zero_grad()
        out = head(*inputs)["loss"]
        out.sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in head.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)
    assert head.counts(batch).tolist() == head.counts(longer).tolist() == [5, 4, 3]
    head = HEADS[kind](HEADS[kind].Config(kind=kind, depth=3, draft_vocab=None), target.spec)
    at_rest = OnlineFeatures(target, head.taps, "float32").get([row])
    at_init = head(batch, at_rest)["loss"] / head.counts(batch)
    assert (at_init <= math.log(target.spec.vocab_size)).all()


def gradients(accelerator, target, micro) -> list[torch.Tensor]:
    """Gradients of one step's loss over `micro`, before clipping."""
    head = random_head(target, "medusa", lm_head="own").double()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    features = OnlineFeatures(target, head.taps, "float32")
    stepper = Stepper(Engine(accelerator, head, optimizer, 1.0), features)
    stepper._backward(micro)
    return [p.grad for p in head.parameters()]


def test_the_gradient_does_not_depend_on_the_split(accelerator):
    """In float64: one batch of 8 rows, micro-batches of unequal loss tokens, one without any."""
    double = make_double()
    rows = documents(LENGTHS)
    rows[2] = Document(rows[2].ids, [False] * 12, 0.0, 3, "3")
    whole = gradients(accelerator, double, [rows])
    for size in (4, 2, 1):
        split = [rows[i : i + size] for i in range(0, 8, size)]
        found = gradients(accelerator, double, split)
        torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-9)
    assert all(g.abs().max() > 0 for g in whole)


def test_depths_without_rows_give_zero_gradients_everywhere(accelerator):
    """T4: nothing to learn in the whole step: no NaN, and every parameter still takes part."""
    empty = [Document([1, 2, 3, 4], [False] * 4, 0.0, 1, "1")]
    grads = gradients(accelerator, make_double(), [empty])
    assert all(g is not None and not g.any() for g in grads)


def test_learning_rate():
    rates = [learning_rate(step, 10, 4, 2.0) for step in range(10)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 0.2
    assert learning_rate(0, 1, 0, 2.0) == 2.0 and learning_rate(0, 1, 1, 2.0) == 2.0


def test_processes_and_accumulation_share_one_stream_of_rows():
    rows = documents(LENGTHS[:7])
    wide = Batches(rows, seed=5, batch_size=6, accumulate=1, world=1)
    deep = Batches(rows, seed=5, batch_size=1, accumulate=3, world=2)
    for step in range(4):
        shares = [deep.micro(step, rank) for rank in (0, 1)]
        joined = [row for a in range(3) for rank in (0, 1) for row in shares[rank][a]]
        assert joined == wide.rows(step) == deep.rows(step)
    stream = [row.row for step in range(7) for row in wide.rows(step)]
    epochs = [stream[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(1, 8)) for epoch in epochs)
    assert epochs[0] != epochs[1]


# -- the frozen target ---------------------------------------------------------------------------


def digest(target: TargetModel) -> dict[str, str]:
    """sha256 of every parameter and buffer."""
    return {
        name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in [*target.model.named_parameters(), *target.model.named_buffers()]
    }


@pytest.mark.parametrize(
    ("kind", "extra"), [*((kind, {}) for kind in sorted(HEADS)), ("medusa", {"lm_head": "own"})]
)
def test_training_leaves_the_target_alone(tmp_path, monkeypatch, kind, extra):
    """T6, with a tied target and weight decay; C5: its tensors are in no file."""
    frozen = make_target(tie_word_embeddings=True)
    before, seen = digest(frozen), []
    monkeypatch.setattr(setup, "load_target", lambda config: frozen)
    real = setup.build_optimizer
    monkeypatch.setattr(setup, "build_optimizer", lambda h, c: seen.append(h) or real(h, c))
    config = make_config(
        tmp_path,
        head={"kind": kind, "depth": 2, "draft_vocab": 64, "taps": [1], **extra},
        optim={"weight_decay": 0.1},
        schedule={"steps": 20, "eval_every": 10, "save_every": 10},
    )
    train(config)
    assert digest(frozen) == before
    assert not any(p.requires_grad for p in frozen.model.parameters())
    assert not frozen.model.training
    names = {name for name, _ in seen[0].named_parameters()} | {"draft_ids"}
    for path in (tmp_path / "run").rglob("model.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == names
    assert load_head(tmp_path / "run", frozen.spec).kind == kind


def test_the_optimizer_holds_the_head_alone(target):
    head = random_head(target)
    optimizer = setup.build_optimizer(head, OptimConfig())
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in head.parameters()]
    assert not {id(p) for p in target.model.parameters()} & set(held)


def test_dropout_of_the_target_is_off():
    """T6."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 320}
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    gpt2 = TargetModel.load(random={"model_type": "gpt2", **sizes, **dropout}, device="cpu")
    rows, features = documents([9, 14]), OnlineFeatures(gpt2, [1], "float32")
    assert torch.equal(features.get(rows)["hidden"], features.get(rows)["hidden"])


# -- a whole run ---------------------------------------------------------------------------------


def test_a_run_leaves_a_head_its_config_and_its_metrics(tmp_path):
    config = make_config(tmp_path)
    result = train(config)
    lines = metrics(tmp_path / "run")
    steps, evals = [x for x in lines if "loss" in x], [x for x in lines if "eval" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4, 5, 6]
    assert [x["step"] for x in evals] == [3, 6]
    assert {len(x["rows"]) for x in steps} == {2}
    assert all(len(x["loss_k"]) == len(x["top1_k"]) == 3 for x in steps)
    description = json.loads((tmp_path / "run" / "head.json").read_text())
    best = max(x["eval"]["tau"] for x in evals)
    assert result.tau == description["tau"] == best
    learned = load_documents(config, make_target()).train
    assert description["trained_length"] == max(len(d.ids) for d in learned) < 96
    assert load_config(tmp_path / "run" / "config.yaml") == make_config(tmp_path)


def test_the_best_head_stays_when_tau_falls(tmp_path, monkeypatch):
    taus = iter([1.5, 1.7, 1.6])

    monkeypatch.setattr(trainer, "measure", lambda *a: {**measure(*a), "tau": next(taus)})
    result = train(make_config(tmp_path, schedule={"eval_every": 2}))
    description = json.loads((tmp_path / "run" / "head.json").read_text())
    assert (result.tau, description["tau"], description["step"]) == (1.7, 1.7, 4)


def test_without_held_out_prompts_the_last_head_is_kept(tmp_path):
    assert train(make_config(tmp_path, data={"eval_prompts": 0})).tau is None
    assert json.loads((tmp_path / "run" / "head.json").read_text())["step"] == 6


def test_tau_is_one_plus_the_joint_prefix(accelerator, target):
    """By hand: a row counts at depth k when all of its first k argmaxes are the text."""
    head, rows = random_head(target), documents(LENGTHS)
    features = OnlineFeatures(target, head.taps, "float32")
    found = evaluate(head, rows, features, 3, accelerator)
    prefix, counts = torch.zeros(3), torch.zeros(3)
    for row in rows:
        batch = collate([row])
        prefix += head(batch, features.get([row]))["prefix"]
        counts += head.counts(batch)
    assert found["tau"] == pytest.approx(1 + (prefix / counts).sum().item())
    assert found["tau_by_depth"] == pytest.approx((prefix / counts).tolist())


# -- bad rows and bad numbers --------------------------------------------------------------------


def test_rows_whose_answer_is_cut_away_are_skipped_and_counted(tmp_path, capsys):
    """T4 (a)."""
    config = make_config(tmp_path, data={"max_length": 48, "eval_prompts": 2})
    long = {"role": "user", "content": "long " * 30}
    with open(config.data.file, "a") as file:
        file.write(json.dumps({"messages": [long, {"role": "assistant", "content": "a"}]}) + "\n")
    train(config)
    assert "fewer than two loss tokens left within max_length" in capsys.readouterr().out
    assert not any(x.get("skipped") for x in metrics(tmp_path / "run"))


def test_no_row_with_a_loss_token_is_an_error_before_the_first_step(tmp_path):
    """T4 (b)."""
    with pytest.raises(InputError, match="max_length"):
        train(make_config(tmp_path, data={"max_length": 5}))
