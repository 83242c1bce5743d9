"""The import law: heads <- inference <- train <- scripts, and heavy libraries only in train."""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["heads", "inference", "train", "scripts"]  # each imports itself and what stands before it
HEAVY = {"accelerate", "datasets", "wandb", "deepspeed"}  # never in the first two


def imported(source: str, path: PurePath) -> Iterator[str]:
    """The dotted name of every import; relative ones are made absolute (`selfdraft.…`)."""
    package = ("selfdraft", *path.parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            stem = [*base, node.module] if node.module else base
            yield from (".".join([*stem, alias.name]) for alias in node.names)


def broken(source: str, path: PurePath) -> list[str]:
    """The imports of `source`, the file at `path` below the root, that break the law."""
    rank = LAYERS.index(path.parts[0]) if path.parts[0] in LAYERS else len(LAYERS)

    def forbidden(name: str) -> bool:
        first, second, *_ = [*name.split("."), ""]
        above = first == "selfdraft" and second in LAYERS[rank + 1 :]
        return first in LAYERS or above or (rank < 2 and first in HEAVY)

    return [name for name in imported(source, path) if forbidden(name)]


@pytest.mark.parametrize("layer", [*LAYERS, "tests", "."])
def test_the_tree_keeps_the_law(layer: str) -> None:
    files = sorted((ROOT / layer).glob("*.py" if layer == "." else "**/*.py"))
    assert files
    assert [(f, b) for f in files for b in broken(f.read_text(), f.relative_to(ROOT))] == []


@pytest.mark.parametrize(
    ("path", "source", "caught"),
    [
        ("heads/x.py", "from ..inference.target import TargetModel", True),
        ("heads/x.py", "def f():\n    from selfdraft import train", True),
        ("inference/x.py", "from .. import train", True),
        ("train/x.py", "import selfdraft.scripts.bench", True),
        ("inference/x.py", "import datasets.arrow_dataset", True),
        ("scripts/x.py", "from heads.base import Head", True),
        ("train.py", "import train", True),
        ("tests/x.py", "from selfdraft.train import trainer", False),
        ("train/x.py", "import wandb\nfrom ..heads import HEADS\nfrom . import data", False),
    ],
)
def test_a_violation_is_caught(path: str, source: str, caught: bool) -> None:
    assert bool(broken(source, PurePath(path))) == caught
