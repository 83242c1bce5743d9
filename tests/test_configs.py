"""Every file of configs/ is a run that can start: found by a recursive glob, counted, validated."""

import argparse
from pathlib import Path

import pytest
import torch
from fixtures import batch_of, tiny

from selfdraft.heads import HEADS
from selfdraft.scripts import experiments
from selfdraft.train.config import load_config

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"accelerate", "variants"}  # folders of files that are no runs
RUNS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "configs").rglob("*.yaml")
    if path.parent.name not in ELSEWHERE
)
FAMILIES = ["configs", "configs/llama-3.1-8b", "configs/qwen3-8b"]


def test_all_of_them_are_found() -> None:
    smoke = {"configs/quickstart.yaml", "configs/tiny.yaml"}
    kinds = {f"{folder}/{kind}.yaml" for folder in FAMILIES for kind in HEADS}
    assert set(RUNS) == smoke | kinds
    assert len(RUNS) == 2 + 3 * 4


@pytest.mark.parametrize("path", RUNS)
def test_a_config_is_whole(path: str) -> None:
    config = load_config(ROOT / path)
    launch, *header = (ROOT / path).read_text().split("\ntarget:")[0].splitlines()
    assert launch == f"# accelerate launch train.py {path}"
    assert all(line.startswith("# ") for line in header)
    assert header[0].startswith("# first: python scripts/prepare_data.py configs/")
    assert config.data.prompts
    assert (ROOT / config.data.prompts).is_file()
    assert Path(path).stem in (config.head.kind, "quickstart", "tiny")


VARIANTS = {"data": 2, "losses": 7, "optim": 5, "size": 8}


def test_files_of_variants_are_found() -> None:
    assert {path.stem for path in (ROOT / "configs" / "variants").iterdir()} == set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_another_training_and_learns(name: str, tmp_path) -> None:
    path = ROOT / "configs" / "variants" / f"{name}.yaml"
    assert f"--variants configs/variants/{name}.yaml" in path.read_text()
    more = ["head.loss=ce"] if name == "losses" else []
    options = argparse.Namespace(
        config=str(ROOT / "configs" / "hydra.yaml"), overrides=more, output=str(tmp_path)
    )
    named = experiments.read_variants(Path(f"configs/variants/{name}.yaml"), ("base",))
    made = experiments.overridden(options, {"base": {}} | named, [])
    assert len(made) == VARIANTS[name] + 1
    parts = {v.config.model_dump_json(include={"head", "data", "optim", "schedule"}) for v in made}
    assert len(parts) == len(made)  # each differs from the base and from all others
    assert len({(v.config.answers_file, v.config.features_folder) for v in made}) == 1
    spec, batch = tiny().spec, batch_of([14, 9])
    for variant in made:
        fields = variant.config.head
        rank = min(fields.low_rank, spec.hidden_size)  # no real target is as narrow
        config = fields.model_copy(update={"low_rank": rank})
        ids = None if config.draft_vocab is None else torch.arange(0, spec.vocab_size, 3)
        head = HEADS[config.kind](config, spec, ids)
        features = tiny().features(batch["ids"], batch["length"], head.taps)
        loss_K = head(batch, features)["loss"]
        loss_K.sum().backward()
        assert loss_K[0] > 0 and loss_K.isfinite().all(), variant.name


def test_runs_write_into_folders_of_their_own() -> None:
    folders = [load_config(ROOT / path).output_dir for path in RUNS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("path", [path for path in RUNS if "-8b" in path])
def test_estimates_are_marked(path: str) -> None:
    assert "Estimates, not measured" in (ROOT / path).read_text()
