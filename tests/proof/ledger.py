"""What `make proof` has shown so far: JSON under docs/results/proof/, a case at a time."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from selfdraft.heads.checkpoint import replace_file
from selfdraft.scripts.bench_report import commit

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results" / "proof"


class Ledger:
    """Results by case number; those of another commit are done again.

    Args:
        name: of the JSON file.
    """

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.json"
        self.cases: dict[str, Any] = {}
        self.conditions = {
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
            "date": time.strftime("%Y-%m-%d"),
        }
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["conditions"]["commit"] == self.conditions["commit"]:
                self.cases = kept["cases"]

    def settle(self, number: int, case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a case: read, or found now and written down."""
        if str(number) not in self.cases:
            self.cases[str(number)] = case()
            text = json.dumps({"conditions": self.conditions, "cases": self.cases}, indent=1)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, lambda to: Path(to).write_text(text + "\n"))
        return self.cases[str(number)]
