"""The config of a run: numbers, unknown keys, overrides, paths."""

from pathlib import Path

import pytest
import yaml
from config_files import problems, write

from selfdraft.heads.errors import InputError
from selfdraft.heads.hydra import HydraConfig
from selfdraft.heads.medusa import MedusaConfig
from selfdraft.train.config import PACKAGE, ConfigError, TrainConfig, load_config, resolve_path


def test_defaults(tmp_path):
    config = load_config(write(tmp_path))
    assert (config.head.kind, config.schedule.steps, config.optim.lr) == ("hydra", 10, 1e-3)
    assert isinstance(config.head, HydraConfig)
    assert config.answers_file == Path("runs/x/answers.jsonl")
    assert config.features_folder == Path("runs/x/features")


@pytest.mark.parametrize(
    ("text", "number"),
    [("2e-5", 2e-5), ("1e-4", 1e-4), ("1", 1.0), (".5e-3", 5e-4), ("1.5e2", 150)],
)
def test_numbers_in_a_file_and_as_override(tmp_path, text, number):
    """F1: YAML 1.1 takes 2e-5 for text."""
    in_file = load_config(write(tmp_path, optim=f"{{lr: {text}}}"))
    override = load_config(write(tmp_path), [f"optim.lr={text}"])
    assert in_file.optim.lr == override.optim.lr == number
    assert isinstance(in_file.optim.lr, float)


@pytest.mark.parametrize("text", ["1e2", "100", "1E+2"])
def test_whole_numbers(tmp_path, text):
    in_file = load_config(write(tmp_path, schedule=f"{{steps: 200, warmup: {text}}}"))
    override = load_config(write(tmp_path), [f"schedule.warmup={text}"])
    assert in_file.schedule.warmup == override.schedule.warmup == 100


@pytest.mark.parametrize(
    "text", ["'0.001'", "true", "yes", "abc", "[1]", ".nan", "-1", "0", "1e999"]
)
def test_no_numbers(tmp_path, text):
    """F1: one error with the path, for the file and for the override."""
    for found in (
        problems(write(tmp_path, optim=f"{{lr: {text}}}")),
        problems(write(tmp_path), f"optim.lr={text}"),
    ):
        assert len(found) == 1
        assert found[0].startswith("optim.lr = ")


def test_all_problems_at_once(tmp_path):
    path = write(
        tmp_path,
        head="{kind: hydra, widht: 4, depth: '3'}",
        optim="{lr: '0.001', weight_decay: true}",
        data="{answers: [{temperatur: 0}], max_lenght: 5, features: {cache: 1}}",
        schedule="{step: 10}",
        lr="1",
    )
    found = problems(path)
    wanted = {
        "head.widht = 4": "'width'",
        "head.depth = '3'": "integer",
        "optim.lr = '0.001'": "number",
        "optim.weight_decay = True": "number",
        "data.answers.0.temperatur = 0": "'temperature'",
        "data.max_lenght = 5": "'max_length'",
        "data.features.cache = 1": "boolean",
        "schedule.steps": "missing",
        "schedule.step = 10": "'steps'",
        "lr = 1": "'optim.lr'",
    }
    assert len(found) == len(wanted)
    for start, hint in wanted.items():
        assert any(line.startswith(start) and hint in line for line in found), (start, found)


def test_unknown_overrides(tmp_path):
    found = problems(
        write(tmp_path), "optim.lrr=1", "nothing", "target.model.x=1", "a..b=1", "seed=["
    )
    assert len(found) == 5
    assert any("optim.lrr" in line and "'lr'" in line for line in found)


def test_unknown_kind(tmp_path):
    assert "'medusa'" in problems(write(tmp_path, head="{kind: medussa, x: 1}"))[0]
    assert problems(write(tmp_path, head="{depth: 2}"))[0].startswith("head.kind = None")
    assert problems(write(tmp_path, head="7"))[0].startswith("head = 7")


def test_override_of_the_kind_resets_the_head(tmp_path, capsys):
    path = write(tmp_path, head="{kind: hydra, depth: 7, width: 32}")
    config = load_config(path, ["head.decay=0.5", "head.kind=medusa"])
    assert config.head == MedusaConfig(decay=0.5)
    assert "['depth', 'width']" in capsys.readouterr().out
    assert load_config(path, ["head.depth=2"]).head == HydraConfig(depth=2, width=32)


def test_exactly_one_target(tmp_path):
    assert "exactly one" in problems(write(tmp_path, target="{dtype: float32}"))[0]
    assert "exactly one" in problems(write(tmp_path), "target.random={model_type: llama}")[0]
    changed = load_config(write(tmp_path), ["target.model=null", "target.random.model_type=llama"])
    assert changed.target.random == {"model_type": "llama"}


def test_a_device_map_is_auto_or_a_device_by_module(tmp_path):
    for text, wanted in (
        ("auto", "auto"),
        ("{lm_head: 0, model: disk}", {"lm_head": 0, "model": "disk"}),
    ):
        config = load_config(write(tmp_path), [f"target.device_map={text}"])
        assert config.target.device_map == wanted
    for text in ("5", "cuda", "{}", "{model: [0]}", "{model: 1.5}"):
        (line,) = problems(write(tmp_path), f"target.device_map={text}")
        assert line.startswith("target.device_map = ") and "mapping of modules" in line


def test_equal_keys(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text() + "seed: 1\nseed: 2\n")
    assert "seed" in problems(path)[0]
    assert "twice" in problems(write(tmp_path), "optim={lr: 1, lr: 2}")[0]
    for text in ("{[1]: 2}", "{{ OUT }}", "!!bool abc", "!!int ''", "!!map [a]", "!!timestamp abc"):
        assert problems(write(tmp_path), f"output_dir={text}")


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "a: b: c", "\x00"])
def test_no_config(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"does not exist\nDid you mean 'configs/tiny.yaml'"):
        load_config("configs/tinny.yaml")


def test_paths_fall_back_to_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "configs/prompts/train.jsonl"
    assert resolve_path(name) == PACKAGE / name
    assert resolve_path("nowhere.jsonl") == Path("nowhere.jsonl")
    (tmp_path / "configs/prompts").mkdir(parents=True)
    (tmp_path / name).write_text("{}")
    assert resolve_path(name) == Path(name)


def test_dump_loads_again(tmp_path):
    config = load_config(write(tmp_path, head="{kind: hydra, width: 32}"), ["optim.lr=2e-5"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path) == config


def test_shipped_configs():
    files = sorted((PACKAGE / "configs").glob("*.yaml"))
    assert {"hydra", "medusa", "quickstart", "tiny"} <= {file.stem for file in files}
    for file in files:
        assert isinstance(load_config(file), TrainConfig)
        first = file.read_text().splitlines()[0]
        assert first.startswith("# ") and f"configs/{file.name}" in first
