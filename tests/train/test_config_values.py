"""Values of a config and names in it that mean something else than they seem to."""

from pathlib import Path

import pytest
from config_files import MINIMAL, problems, write

from selfdraft.train.config import load_config
from selfdraft.train.hub import shard
from selfdraft.train.overrides import parse_yaml


@pytest.mark.parametrize("text", ["1:30", "010", "-07", "1:30.5", "0o17", "190:20:30"])
def test_numbers_of_yaml_11_are_refused_not_reread(tmp_path, text):
    """In a file and as override: 1:30 was 90, 010 was 8."""
    for found in (
        problems(write(tmp_path, schedule=f"{{steps: 10, minutes: {text}}}")),
        problems(write(tmp_path), f"schedule.minutes={text}"),
    ):
        assert found == [found[0]] and found[0].startswith(f"schedule.minutes = '{text}'")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-12", -12),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0b101", 5),
        ("0.5", 0.5),
        ("-0.25e-3", -0.00025),
        ("1.", 1.0),
        ("+.5", 0.5),
        ("1e3", 1000),
        ("-.inf", float("-inf")),
        ("10", 10),
    ],
)
def test_all_other_numbers_are_read(text, value):
    found, faults = parse_yaml(text)
    assert (found, type(found), faults) == (value, type(value), [])


def test_home_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("output_dir", "resume", "target.model", "target.adapter", "data.prompts", "data.file")
    names += ("data.answers_drafter", "data.features.folder")
    config = load_config(write(tmp_path), [f"{name}=~/{name}" for name in names])
    fields = config.model_dump()
    for name in names:
        value = fields
        for part in name.split("."):
            value = value[part]
        assert value == str(tmp_path / name)
    assert config.features_folder == tmp_path / "data.features.folder"
    same = load_config(write(tmp_path), ["data.file=hub:me/set", "resume=latest"])
    assert (same.data.file, same.resume, same.data.answers_drafter) == (
        "hub:me/set",
        "latest",
        "none",
    )


@pytest.mark.parametrize("kind", ["[1]", "{a: 1}", "null", "3"])
def test_a_kind_of_no_name_beside_an_unknown_key(tmp_path, kind):
    found = problems(write(tmp_path), f"head.kind={kind}", "foo=1", "head.widht=1")
    assert any(line.startswith("foo = 1: unknown key") for line in found)
    assert any("head.kind" in line and "Available" in line for line in found)


@pytest.mark.parametrize("random", ["&a {model_type: llama, x: *a}", "&a {x: [1, {y: *a}]}"])
def test_a_value_that_holds_itself_is_no_yaml(tmp_path, random):
    path = write(tmp_path, target=f"{{random: {random}}}")
    assert problems(path) == [found := problems(path)[0]] and "recursive" in found
    twice = MINIMAL + "optim: {betas: &b [0.9, 0.95]}\ntracking: {name: &n x, project: *n}\n"
    assert load_config(write(tmp_path, twice)).tracking.project == "x"


def test_datasets_of_like_names_have_files_of_their_own():
    asked = [("me/my_data", None), ("me/my-data", None), ("me-my/data", None)]
    asked += [("me/my-data-10", None), ("me/my-data", 10), ("me/my.data", None)]
    files = {shard(f"hub:{name}", Path("r"), limit) for name, limit in asked}
    assert len(files) == len(asked)
    assert {path.parent for path in files} == {Path("r/hub")}
