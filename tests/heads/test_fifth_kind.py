"""A further head kind is one file in heads/: configs, training features and decoding know it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIFTH = '''
"""Repeats the target's state."""

from typing import Literal

import torch

from .base import Head, HeadConfig, register


class EchoConfig(HeadConfig):
    """No further fields."""

    kind: Literal["echo"] = "echo"


@register
class Echo(Head):
    """One scale."""

    kind, Config = "echo", EchoConfig

    def __init__(self, config, spec, draft_ids=None):
        super().__init__(config, spec, draft_ids)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def unroll(self, batch, features, rows):
        return [features["hidden"].flatten(0, 1)[r] * self.scale for r in rows]

    def step(self, state, paths_BLk, place_BL, memo):
        return (state.hidden_BW * self.scale)[:, None].expand(-1, paths_BLk.shape[1], -1)
'''
USE = """
import sys
import torch
from selfdraft import Speculator
from selfdraft.heads import HEADS
from selfdraft.train.config import load_config
from selfdraft.inference.target import TargetModel

config = load_config(sys.argv[1], ["head.kind=echo", "head.depth=2"])
target = TargetModel.load(random=config.target.random, dtype="float32", device="cpu")
head = HEADS["echo"](config.head, target.spec).eval()
ids = torch.arange(20)[None]
batch = {"ids": ids, "loss_mask": torch.ones_like(ids, dtype=torch.bool)}
head(batch, target.features(ids, torch.tensor([20]), head.taps))["loss"].sum().backward()
assert head.scale.grad is not None
out, plain = (Speculator(target, h).generate([[5, 6]], max_new_tokens=8) for h in (head, None))
assert out.token_ids == plain.token_ids and out.stats.accepted_by_depth
print(sorted(HEADS))
"""


def test_a_fifth_kind_is_one_file(tmp_path: Path) -> None:
    package = tmp_path / "selfdraft"
    (package / "heads").mkdir(parents=True)
    for path in [*ROOT.iterdir(), *(ROOT / "heads").iterdir()]:
        link = package / path.relative_to(ROOT)
        if not link.exists() and not path.name.startswith((".", "__pycache__")):
            link.symlink_to(path)
    (package / "heads" / "echo.py").write_text(FIFTH)
    printed = subprocess.run(
        [sys.executable, "-c", USE, str(ROOT / "configs" / "tiny.yaml")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[-1] == "['eagle', 'echo', 'hydra', 'medusa', 'mtp']"
