"""A tiny run for the tests of training: random llama target, chats of a few words."""

import json
import random
from pathlib import Path
from typing import Any

import fixtures
import torch
from accelerate.state import AcceleratorState, GradientState

from selfdraft.heads import HEADS, Head
from selfdraft.inference.random_target import byte_tokenizer
from selfdraft.inference.target import TargetModel
from selfdraft.train.config import TrainConfig
from selfdraft.train.packing import Document
from selfdraft.train.trainer import Result, run

LLAMA = {key: value for key, value in fixtures.LLAMA.items() if key != "initializer_range"}
LLAMA["max_position_embeddings"] = 512
WORDS = "the a cat dog sat ran on in mat hat big red".split()


def write_data(path: Path, rows: int = 20) -> Path:
    """A chat file of `rows` different prompts."""
    dice = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(least, most)))

    with path.open("w") as file:
        for row in range(rows):
            turns = [("user", f"{row} {text(1, 3)}"), ("assistant", text(2, 5))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_config(tmp_path: Path, **sections: Any) -> TrainConfig:
    """A run of 6 steps in tmp_path/run; `sections` are merged into it."""
    data = tmp_path / "data.jsonl"
    fields: dict[str, Any] = {
        "target": {"random": LLAMA, "dtype": "float32", "device": "cpu"},
        "head": {"kind": "hydra", "depth": 3, "draft_vocab": 64},
        "data": {
            "file": str(data if data.exists() else write_data(data)),
            "max_length": 96,
            "eval_prompts": 4,
        },
        "optim": {"lr": 0.01},
        "schedule": {"steps": 6, "warmup": 2, "batch_size": 2, "eval_every": 3, "save_every": 3},
        "output_dir": str(tmp_path / "run"),
    }
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(fields.get(name), dict)
        fields[name] = {**fields[name], **value} if both else value
    return TrainConfig.model_validate(fields)


def train(config: TrainConfig) -> Result:
    """A run in this process, which has had others."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return run(config)


def metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").open()]


def documents(lengths: list[int], answer: int = 6) -> list[Document]:
    """Random ids, the last `answer` of each written by the target."""
    ids = torch.Generator().manual_seed(1)
    return [
        Document(
            torch.randint(0, 256, (length,), generator=ids).tolist(),
            [position >= length - answer for position in range(length)],
            0.0,
            row,
            str(row),
        )
        for row, length in enumerate(lengths, start=1)
    ]


def make_target(**fields: Any) -> TargetModel:
    """The tiny target, or another one."""
    return TargetModel.load(random={**LLAMA, **fields}, dtype="float32", device="cpu")


def save_target(folder: Path, fields: dict[str, Any] | None = None) -> Path:
    """A tiny target with a byte tokenizer, in a folder."""
    fixtures.stock(fields or LLAMA | {"initializer_range": 0.2}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_double() -> TargetModel:
    """The tiny target in float64."""
    target = TargetModel.load(random=LLAMA, dtype="float32", device="cpu", pack=False)
    return TargetModel(target.model.double(), target.tokenizer)


def random_head(target: TargetModel, kind: str = "hydra", **fields) -> Head:
    """A head whose zero-initialised parts are drawn, so that every gradient is there."""
    torch.manual_seed(3)
    cls = HEADS[kind]
    head = cls(cls.Config(kind=kind, depth=3, taps=[1, 2], draft_vocab=None, **fields), target.spec)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return head
