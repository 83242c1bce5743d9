"""Every file of configs/ is a run that can start: found by a recursive glob, counted, validated."""

from pathlib import Path

import pytest

from selfdraft.heads import HEADS
from selfdraft.train.config import load_config

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"accelerate"}  # folders of files that are no runs
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


def test_runs_write_into_folders_of_their_own() -> None:
    folders = [load_config(ROOT / path).output_dir for path in RUNS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("path", [path for path in RUNS if "-8b" in path])
def test_estimates_are_marked(path: str) -> None:
    assert "Estimates, not measured" in (ROOT / path).read_text()
