"""Objectives as a config names them, through whole heads, and what they cost in memory."""

import json
import subprocess
import sys

import pytest
import torch
from fixtures import batch_of, double, make_head
from loss_reference import distil, scene
from pydantic import ValidationError
from torch import Tensor

from selfdraft.heads import HEADS, objectives
from selfdraft.heads.objectives import objective

LOSSES = [*objectives.TERMS, objectives.ACCEPTED, {"kl": 0.5, "tv": 0.5}]


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_head_learns_from_every_objective(loss, some: bool) -> None:
    target, batch = double(), batch_of([20, 13])
    ids = list(range(0, target.spec.vocab_size, 3)) if some else None
    head = make_head("hydra", target.spec, loss=loss, draft_ids=ids)
    features = target.features(batch["ids"], batch["length"], [])
    means = []
    optimizer = torch.optim.SGD(head.parameters(), lr=0.02)
    for _ in range(4):
        loss_K = head(batch, features)["loss"] / head.counts(batch)
        assert (loss_K > 0).all()
        optimizer.zero_grad()
        loss_K.sum().backward()
        for name, parameter in head.named_parameters():
            assert parameter.grad.abs().sum() > 0, name
        optimizer.step()
        means.append(float(loss_K.detach().sum()))
    assert means[-1] < means[0]


@pytest.mark.parametrize("loss", [*LOSSES, {"lk": 1.0, "accepted_length": 1.0}], ids=str)
def test_an_empty_mask_gives_zero_sums_and_reaches_every_parameter(loss) -> None:
    target, batch = double(), batch_of([9])
    head = make_head("medusa", target.spec, loss=loss, lm_head="own", draft_ids=[1, 5, 9])
    batch["loss_mask"][:] = False
    loss_K = head(batch, target.features(batch["ids"], batch["length"], []))["loss"]
    assert loss_K.tolist() == [0.0] * 3
    loss_K.sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@torch.no_grad()
def test_evaluation_reports_the_acceptance_of_reduced_vocabularies() -> None:
    target, batch = double(), batch_of([30, 20])
    features = target.features(batch["ids"], batch["length"], [])
    sums = []
    for ids in (None, list(range(0, target.spec.vocab_size, 2)), [3, 4]):
        out = make_head("hydra", target.spec, scale=0.0, draft_ids=ids)(batch, features)
        assert (out["accepted"].diff() <= 0).all()  # later drafts are reached less often
        sums.append(float(out["accepted"][0]))
    assert sums[0] > sums[2] > 0


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("klx", "Did you mean 'kl'"),
        ({"tvv": 1.0}, "Did you mean 'tv'"),
        ({}, "a name or weights by name"),
        (3, "a name or weights by name"),
        (["kl"], "a name or weights by name"),
        ({"kl": 0}, "a number above 0"),
        ({"kl": -1.0}, "a number above 0"),
        ({"kl": float("nan")}, "a number above 0"),
        ({"kl": True}, "a number above 0"),
        ({"kl": "1"}, "a number above 0"),
        ({1: 1.0}, "no objective 1"),
    ],
)
def test_a_bad_loss_is_one_clear_error(loss, problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        HEADS["hydra"].Config(loss=loss)
    (found,) = error.value.errors()
    assert found["loc"] == ("loss",)
    assert problem in found["msg"]


def test_a_config_keeps_its_loss_as_it_was_written() -> None:
    for loss in LOSSES:
        config = HEADS["hydra"].Config(loss=loss)
        again = HEADS["hydra"].Config.model_validate(json.loads(json.dumps(config.model_dump())))
        assert again.loss == config.loss == loss
    mixed = objective({"kl": 2, "accepted_length": 0.5})
    assert (dict(mixed.weights), mixed.accepted) == ({"kl": 2}, 0.5)


def test_eta_leads_from_kl_to_tv() -> None:
    """l = exp(-eta alpha): 1 for a small eta, 0 for a large one, and by definition between."""
    s = scene(3, False, True)

    def of(loss: str, eta: float = 3.0) -> Tensor:
        with torch.no_grad():
            return distil(loss, s, objective=objective(loss, eta))["loss"]

    torch.testing.assert_close(of("lk_hybrid", 1e-12), of("kl"))
    torch.testing.assert_close(of("lk_hybrid", 1e6), of("tv"))
    assert of("lk_hybrid").equal(of("lk_hybrid", 3.0))
    assert not of("lk_hybrid", 10.0).equal(of("lk_hybrid", 3.0))
    head = make_head("hydra", double().spec, loss="lk_hybrid", lk_eta=10.0)
    batch = batch_of([12])
    features = double().features(batch["ids"], batch["length"], [])
    other = make_head("hydra", double().spec, loss="lk_hybrid")
    assert not head(batch, features)["loss"].equal(other(batch, features)["loss"])


@pytest.mark.parametrize("eta", [0, -1.0, float("inf"), float("nan"), True, "3"])
def test_a_bad_eta_is_refused(eta) -> None:
    with pytest.raises(ValidationError):
        HEADS["hydra"].Config(loss="lk_hybrid", lk_eta=eta)


MEASURE = """
import sys, torch
from selfdraft.heads import losses, objectives
name, rows_B, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
T, K, W, D = 512, 4, 64, 4096
lm_head, hidden = torch.randn(vocab, W), torch.randn(rows_B * T, W)
ids, draft_ids = torch.randint(0, vocab, (rows_B * T,)), torch.arange(D) * (vocab // D)
if sys.argv[4] == "all":
    draft_ids = None
kept = lm_head if draft_ids is None else lm_head[draft_ids]

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

def learn(rows_B, T):
    mask = torch.ones(rows_B, T, dtype=torch.bool)
    rows = losses.loss_rows({"loss_mask": mask}, K)
    states = [torch.randn(len(r), W, requires_grad=True) for r in rows]
    before = peak()
    out = losses.distil(
        objectives.objective(name), states, rows, hidden=hidden, ids=ids[: rows_B * T],
        draft_ids=draft_ids, project=lambda h: h @ kept.T, weights=None,
        project_all=lambda h: h @ lm_head.T,
    )
    out["loss"].sum().backward()
    return before

learn(1, 8)  # what libraries allocate once is not counted
open("/proc/self/clear_refs", "w").write("5")
before = learn(rows_B, T)
print(peak() - before)
"""


def measure(name: str, rows: int, vocab: int, drafted: str) -> int:
    """Bytes by which the peak of a fresh process grows during a loss and its gradient."""
    command = [sys.executable, "-c", MEASURE, name, str(rows), str(vocab), drafted]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


NAIVE = 4 * 512 * 4 * 49152 * 4  # bytes of all logits: B=4, T=512, K=4, V=49,152, float32
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("name", ["kl", "accepted_length"])
def test_memory_is_an_eighth_of_the_naive_logits(name: str) -> None:
    """Over a draft vocabulary, whose acceptance still looks at all of V."""
    assert measure(name, 4, 49152, "some") <= NAIVE / 8


@linux
@pytest.mark.proof
@pytest.mark.parametrize("name", [*objectives.TERMS, objectives.ACCEPTED])
def test_memory_over_the_whole_vocabulary(name: str) -> None:
    assert measure(name, 4, 49152, "all") <= NAIVE / 8
