"""What the docs name exists, what exists does something, and the code of the docs runs (F4)."""

import ast
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from training import make_config, train

from selfdraft.heads import HEADS
from selfdraft.scripts import cli
from selfdraft.train.config import PACKAGE, ConfigError, TrainConfig, load_config

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


def default_of(key: str) -> Any:
    """As JSON has it; None too for what has to be given."""
    section = HEADS["hydra"].Config if key.startswith("head.") else KEYS[key]
    name = key.rpartition(".")[2]
    field = section.model_fields[name]
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    return section.model_construct(**{name: value}).model_dump(mode="json")[name]


def test_the_page_of_keys_has_all_of_them_with_their_defaults():
    """Those that only some head kinds have are in heads.md."""
    docs = PACKAGE / "docs"
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) ?\|", (docs / "configs.md").read_text(), re.M)
    page = {key: yaml.safe_load(default) for key, default in rows if key in KEYS}
    of_kinds = re.findall(r"^\| `(\w+)`", (docs / "heads.md").read_text(), re.M)
    sections = {*SECTIONS, "data.features"}
    assert KEYS.keys() - sections - page.keys() <= {f"head.{name}" for name in of_kinds}
    page.pop("head.kind")
    assert page == {key: default_of(key) for key in page}


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


# -- flags ---------------------------------------------------------------------------------------

COMMAND = re.compile(r"scripts/(\w+)\.py((?:[^`\n\\]|\\\n)*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FLAGS = sorted(
    {
        (command[1], flag)
        for page in (*DOCS, PACKAGE / "Makefile")
        for command in COMMAND.finditer(page.read_text())
        for flag in FLAG.findall(command[2])
    }
)


def test_flags_are_found():
    assert {("generate", "--compare"), ("bench", "--against"), ("show_mask", "--rows")} <= {*FLAGS}


@pytest.mark.parametrize("script", sorted({script for script, _ in FLAGS}))
def test_documented_flags_exist(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["selfdraft"])  # put back afterwards
    with pytest.raises(SystemExit):
        cli.main([script.replace("_", "-"), "--help"])
    known = set(FLAG.findall(capsys.readouterr().out))
    assert {flag for name, flag in FLAGS if name == script} <= known


# -- values --------------------------------------------------------------------------------------

TINY = PACKAGE / "configs" / "tiny.yaml"
VALUES = ["true", "false", "2", "5", "0.25", "x", "[0.5, 0.75]", "[1]"]
VALUES += ["auto", "pre", "post", "tv", "[{temperature: 0.5}]", "{model_type: gpt2}"]
SOURCES = {"target.model"}  # stands in place of target.random
BESIDE = {"head.lk_eta": ["head.loss=lk_hybrid"]}  # what a key is refused without


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and f"{prefix}{key}" in KEYS and value
        below = leaves(value, f"{prefix}{key}.") if nested else {}
        found |= below if below and below.keys() <= KEYS.keys() else {f"{prefix}{key}": value}
    return found


def values(kind: str, key: str) -> list[str]:
    """`VALUES`, and the names that a key of few values knows."""
    section = HEADS[kind].Config if key.startswith("head.") else KEYS[key]
    known = get_args(section.model_fields[key.rpartition(".")[2]].annotation)
    return [*VALUES, *(name for name in known if isinstance(name, str))]


def changed_by(kind: str, key: str, value: str) -> set[str]:
    """Keys of the resolved config that an override changes; none where it is refused."""
    base = [f"head.kind={kind}", *BESIDE.get(key, [])]
    try:
        config = load_config(TINY, [*base, f"{key}={value}"])
    except ConfigError:
        return set()
    before = leaves(load_config(TINY, base).model_dump(mode="json"))
    after = leaves(config.model_dump(mode="json"))
    return {name for name in after if after[name] != before.get(name)}


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_every_key_takes_another_value_and_changes_itself_alone(kind):
    base = load_config(TINY, [f"head.kind={kind}"]).model_dump(mode="json")
    for key in leaves(base).keys() - SOURCES - {"head.kind"}:
        assert any(changed_by(kind, key, value) == {key} for value in values(kind, key)), key


# -- code ----------------------------------------------------------------------------------------


def test_the_readmes_code_runs(tmp_path, monkeypatch, capsys):
    """On the tiny target, in place of the quickstart's heads."""
    train(make_config(tmp_path, output_dir=str(tmp_path / "runs" / "quickstart")))
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    whole = [block for block in code if "import" in block]
    assert whole
    capsys.readouterr()
    for block in whole:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
