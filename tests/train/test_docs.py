"""Every key that the docs name exists, and every key that exists does something (F4)."""

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from selfdraft.heads import HEADS
from selfdraft.train.config import PACKAGE, TrainConfig

DOCS = [PACKAGE / "README.md", *sorted((PACKAGE / "docs").glob("*.md"))]
SECTIONS = {"target", "head", "data", "optim", "schedule", "tracking"}
KEY = re.compile(rf"\b((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+|resume|seed|output_dir)(?==|`)")
NOT_KEYS = {"head.json", "data.jsonl"}


def keys(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Dotted keys of a config, with the section that holds each."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        kinds = [head.Config for head in HEADS.values()] if name == "head" else [field.annotation]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        found[prefix + name] = model
        for kind in inner:
            found |= keys(kind, f"{prefix}{name}.")
    return found


KEYS = keys(TrainConfig)


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_documented_keys_exist(doc: Path):
    named = {match[1] for match in KEY.finditer(doc.read_text())} - NOT_KEYS
    assert named <= KEYS.keys(), named - KEYS.keys()


def test_keys_are_looked_for_where_they_stand():
    named = {match[1] for match in KEY.finditer("`schedule.stps=3` and `data.features.max_gb`")}
    assert named - KEYS.keys() == {"schedule.stps"} and "data.features.max_gb" in KEYS


def test_every_key_is_read_somewhere():
    """By its name as an attribute, outside of the file that defines it; `**model_dump()` reads all
    of a section."""
    read: set[str] = set()
    for layer in ("heads", "inference", "train", "scripts"):
        for path in (PACKAGE / layer).glob("*.py"):
            tree = ast.parse(path.read_text())
            read |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    loaded_whole = {"target"}  # TargetModel.load(**config.target.model_dump())
    sections = {name for name, model in KEYS.items() if "." not in name}
    dead = [
        key
        for key in KEYS
        if key.rpartition(".")[2] not in read and key.partition(".")[0] not in loaded_whole
    ]
    assert sections and dead == []
