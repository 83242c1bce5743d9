"""Numbers that are not finite: named, skipped by all, never written (T3)."""

import math
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from training import LLAMA, documents, make_config, random_head, train

from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.train.checkpoint import numbered
from selfdraft.train.engine import Engine
from selfdraft.train.features import OnlineFeatures
from selfdraft.train.packing import Document
from selfdraft.train.step import PATIENCE, Stepper

LENGTHS = [9, 24, 12, 17, 30, 9, 11, 20]


class Poisoned(OnlineFeatures):
    """Features in which one row is infinite."""

    row = 3

    def get(self, rows):
        features = super().get(rows)
        for b, row in enumerate(rows):
            if row.row == self.row:
                features["hidden"][b] = torch.inf
        return features


def test_a_step_that_is_not_finite_is_skipped_and_its_rows_are_named(accelerator, target):
    head, rows = random_head(target), documents(LENGTHS)
    before = [p.detach().clone() for p in head.parameters()]
    optimizer = torch.optim.AdamW(head.parameters())
    poisoned = Poisoned(target, head.taps, "float32")
    stepper = Stepper(Engine(accelerator, head, optimizer, 1.0), poisoned)
    with pytest.warns(
        UserWarning, match=r"step 7 of the hydra head .* depth 1 of row 3; depth 2 of row 3"
    ) as seen:
        assert not stepper([rows[:2], rows[2:4]], 7, 0.1)
    assert "row 1" not in str(seen[0].message) and not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))
    assert stepper([rows[4:]], 8, 0.1) and stepper.skipped == 0
    assert not torch.equal(before[0], next(head.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(PATIENCE - 1):
            assert not stepper([rows[:4]], step, 0.1)
        with pytest.raises(InputError, match="10 steps in a row"):
            stepper([rows[:4]], PATIENCE, 0.1)


def test_bf16_with_large_logits_stays_finite_over_float32_masters(target):
    """T3: a row without loss, one of a single answer token, logits times 50."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loud = {**LLAMA, "model_type": "granite", "logits_scaling": 0.02}
    bf16 = TargetModel.load(random=loud, dtype="bfloat16", device="cpu")
    rows = documents([9, 24, 12, 17])
    rows[0] = Document(rows[0].ids, [False] * 9, 0.0, 1, "1")
    rows[1] = Document(rows[1].ids, [False] * 23 + [True], 0.0, 2, "2")
    head = random_head(bf16)
    optimizer = torch.optim.AdamW(head.parameters())
    features = OnlineFeatures(bf16, head.taps, "bfloat16")
    stepper = Stepper(Engine(accelerator, head, optimizer, 1.0), features)
    for step in range(1, 6):
        assert stepper([rows[:2], rows[2:]], step, 1e-3)
        means = stepper.tally.means(head.loss_weights())
        assert all(math.isfinite(x) for x in [means["loss"], *means["loss_k"]])
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    moments = [v for state in optimizer.state.values() for v in state.values()]
    assert {m.dtype for m in moments} == {torch.float32}


@pytest.mark.parametrize("step", [1, 3])
def test_a_head_that_is_not_finite_is_never_written(tmp_path, monkeypatch, step):
    """T3: neither as the best head nor as a checkpoint."""
    real, calls = Engine.step, []

    def spoil(self, lr):
        calls.append(norm := real(self, lr))
        if len(calls) == step:
            self.parameters[0].data.view(-1)[0] = torch.nan
        return norm

    monkeypatch.setattr(Engine, "step", spoil)
    schedule = {"eval_every": 1, "save_every": 1}
    with pytest.raises(InputError, match=rf"after step {step} the hydra head is not finite: "):
        train(make_config(tmp_path, schedule=schedule))
    for path in (tmp_path / "run").rglob("model.safetensors"):
        assert all(t.isfinite().all() for t in load_file(path).values())
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == min(step - 1, 2)


def test_checkpoints_from_before_a_bad_streak_stay(tmp_path, monkeypatch):
    real, calls = Engine.step, []

    def diverged(self, lr):
        calls.append(real(self, lr))
        return calls[-1] if len(calls) <= 3 else math.inf

    monkeypatch.setattr(Engine, "step", diverged)
    schedule = {"steps": 8, "eval_every": 8, "save_every": 1, "keep_last": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(make_config(tmp_path, schedule=schedule))
    assert [step for step, _ in numbered(tmp_path / "run")] == [8, 3]
