"""Mutated configs and data files: a clean run or a clear error each, no traceback, no hang.

500 of each belong to `make proof`, the first few of each to `make test`.
"""

import json
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from proof.ledger import Ledger
from training import make_config, train, write_data

from selfdraft.heads.errors import InputError
from selfdraft.train.config import TrainConfig, load_config

COUNT, SLICE, SECONDS = 500, 15, 300
VALUES = [-1, 0, 1, 2, 3, 0.5, 1e-5, 2**64, True, None, "", "x", "1", "2e-5", [], [1], {}]
VALUES += [{"a": 1}, float("nan"), float("inf"), "none", "é" * 40]
RUNAWAY = {"steps", "batch_size", "accumulate"}  # a giant here is a long run, and no fault
SIGNS = "\t{}[]:,&*!|>%@`\"'\x00é#- "


class Hung(Exception):
    """A case that took SECONDS, which the widest model that a family makes by itself does not."""


def keys_of(tree: Any, path: tuple = ()) -> list[tuple]:
    """Paths of every value of nested mappings and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: list[tuple] = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, (dict, list)):
            found += keys_of(value, (*path, key))
    return found


def mutate_tree(tree: Any, dice: random.Random) -> None:
    """Changes one value or one key of nested mappings and lists, in place, where one is left."""
    if not tree:
        return
    *parents, key = dice.choice(keys_of(tree))
    section = tree
    for part in parents:
        section = section[part]
    action = dice.choice(["value", "value", "value", "delete", "rename"])
    if action == "value":
        values = [v for v in VALUES if key not in RUNAWAY or type(v) is not int or v < 9]
        section[key] = dice.choice(values)
    elif action == "delete" or isinstance(section, list):
        del section[key]
    else:
        place = dice.randrange(len(str(key)))
        section[str(key)[:place] + dice.choice("xyz_") + str(key)[place + 1 :]] = section.pop(key)


def mutate_lines(text: str, dice: random.Random) -> str:
    """Changes the text itself."""
    lines = text.splitlines(keepends=True)
    place = dice.randrange(len(lines))
    action = dice.choice(["delete", "double", "indent", "sign", "truncate", "swap"])
    if action == "delete":
        del lines[place]
    elif action == "double":
        lines.insert(place, lines[place])
    elif action == "indent":
        lines[place] = " " * dice.randint(1, 5) + lines[place].lstrip(" ")
    elif action == "swap":
        lines[place], lines[0] = lines[0], lines[place]
    else:
        whole = "".join(lines)
        at = dice.randrange(len(whole))
        return whole[:at] + (dice.choice(SIGNS) + whole[at:] if action == "sign" else "")
    return "".join(lines)


def mutated_config(config: TrainConfig, case: int) -> str:
    """The YAML of a config with one to three faults."""
    dice = random.Random(case)
    tree = config.model_dump(mode="json")
    for _ in range(dice.randint(0, 2)):
        mutate_tree(tree, dice)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return mutate_lines(text, dice) if dice.random() < 0.5 or not text else text


def mutated_data(rows: list[dict[str, Any]], case: int) -> bytes:
    """A JSONL file of one or more rows with one to five faults."""
    dice = random.Random(case)
    rows = json.loads(json.dumps(dice.sample(rows, dice.choice([1, 1, 2, 4, len(rows)]))))
    for _ in range(dice.randint(1, 3)):
        mutate_tree(dice.choice(rows), dice)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for _ in range(dice.randint(0, 2)):
        start = dice.randrange(len(content))
        length = dice.choice([1, 1, 9, 2000])
        junk = bytes(dice.randrange(256) for _ in range(min(length, 9)))
        kept = dice.choice([content[start:], content[start + length :], b""])
        content = content[:start] + dice.choice([junk, b"\x00", b"\n", b""]) + kept
    return content


def outcome(attempt: Callable[[], Any]) -> str:
    """`ran`, or the first line of a clear error.

    Raises:
        Hung, or whatever else the attempt raises: the fault that is looked for.
    """

    def ring(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
        return "ran"
    except InputError as error:
        first, *advice = str(error).splitlines()
        assert first and advice and all(advice), error
        return first
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def config(tmp_path, monkeypatch) -> TrainConfig:
    """Two steps with everything on; relative paths stay in the folder, no name is looked up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    schedule = {"steps": 2, "warmup": 1, "batch_size": 2, "eval_every": 1, "save_every": 1}
    return make_config(tmp_path, schedule=schedule)


def try_config(config: TrainConfig, case: int) -> dict[str, Any]:
    """Loads a mutated YAML and, where it is one, trains with it."""
    path = Path(f"mutated-{case}.yaml")
    path.write_text(mutated_config(config, case), encoding="utf-8")
    steps = ["schedule.steps=2", f"output_dir=run-{case}"]
    return {"outcome": outcome(lambda: train(load_config(path, steps)))}


def try_data(config: TrainConfig, case: int) -> dict[str, Any]:
    """Trains on a mutated data file: chats and prepared answers."""
    rows = [json.loads(line) for line in Path(config.data.file or "").read_text().splitlines()]
    for row in rows[::2]:
        ids = [ord(c) for c in row["messages"][0]["content"]]
        row |= {"prompt_ids": ids, "answer_ids": ids[::-1], "temperature": 0.0, "seed": len(ids)}
    path = Path(f"mutated-{case}.jsonl")
    path.write_bytes(mutated_data(rows, case))
    data = config.data.model_copy(update={"file": str(path)})
    changed = config.model_copy(update={"data": data, "output_dir": f"run-{case}"})
    return {"outcome": outcome(lambda: train(changed))}


ATTEMPTS = {"yaml": try_config, "data": try_data}


@pytest.mark.parametrize("kind", ATTEMPTS)
def test_a_few_mutated_files(config, kind):
    found = [ATTEMPTS[kind](config, case)["outcome"] for case in range(SLICE)]
    assert "ran" in found and len(set(found)) > 1


@pytest.mark.proof
@pytest.mark.parametrize("case", range(COUNT))
@pytest.mark.parametrize("kind", ATTEMPTS)
def test_mutated_files(config, kind, case):
    assert Ledger(f"mutated_{kind}").settle(case, lambda: ATTEMPTS[kind](config, case))["outcome"]


def test_the_rows_that_are_mutated_train_as_they_are(config):
    write_data(Path("data.jsonl"))
    assert train(config).step == 2
