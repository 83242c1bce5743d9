"""configs/accelerate: every recipe is one that accelerate launches as its first line says."""

import shlex
import subprocess
import sys
from itertools import takewhile
from types import SimpleNamespace

import pytest
import yaml
from launch import environment, write_config
from training import make_config, metrics

from selfdraft.heads.errors import InputError
from selfdraft.train import setup, zero_config
from selfdraft.train.config import PACKAGE

RECIPES = sorted((PACKAGE / "configs" / "accelerate").rglob("*.yaml"))
KINDS = {
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "machines": "MULTI_GPU",
    "one_gpu": "NO",
    "zero2": "DEEPSPEED",
    "zero2_cpu": "DEEPSPEED",
}


def launch_line(recipe) -> tuple[dict[str, str], list[str]]:
    """Variables and words of the first line."""
    words = shlex.split(recipe.read_text().splitlines()[0].removeprefix("# "))
    variables = list(takewhile(lambda word: "=" in word, words))
    return dict(word.split("=") for word in variables), words[len(variables) :]


def test_there_is_a_recipe_for_each_way():
    assert {recipe.stem for recipe in RECIPES} == set(KINDS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_accelerate_accepts_the_launch_line(recipe, monkeypatch):
    from accelerate.commands import launch
    from accelerate.commands.config import load_config_from_file

    fields = load_config_from_file(str(recipe))
    assert fields.distributed_type.value == KINDS[recipe.stem]
    _, (command, sub, *words) = launch_line(recipe)
    assert (command, sub) == ("accelerate", "launch")
    monkeypatch.chdir(PACKAGE)
    arguments, defaults, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(words)
    )
    assert arguments.training_script == "train.py"
    assert arguments.training_script_args == ["CONFIG"]
    assert int(arguments.num_processes) == defaults.num_processes
    deepspeed = KINDS[recipe.stem] == "DEEPSPEED"
    assert (arguments.use_deepspeed, arguments.use_fsdp) == (deepspeed, recipe.stem == "fsdp2")
    assert not deepspeed or arguments.zero_stage == 2
    # Every key is one that accelerate knows: it drops others without a word.
    given = yaml.safe_load(recipe.read_text())
    parser_keys = set(vars(arguments))
    for section in ("deepspeed_config", "fsdp_config"):
        assert set(given.get(section, {})) <= parser_keys


def deepspeed_of(settings):
    plugin = SimpleNamespace(deepspeed_config=settings)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def test_a_deepspeed_config_without_zero_is_refused_in_two_lines(tmp_path):
    """A real launch with a user's own file."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto"}')
    path = write_config(tmp_path / "run.yaml", make_config(tmp_path))
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"),
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(PACKAGE / "train.py"), str(path)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "accelerate refuses the DeepSpeed config" in done.stderr


def test_launches_that_would_be_ignored_or_fail_are_refused(tmp_path, monkeypatch, target):
    """R11: ZeRO-3 would empty the target; accelerate ignores FSDP on a CPU."""
    config, fine = make_config(tmp_path), {"zero_optimization": {"stage": 2}}
    refused = {
        "ZeRO stage 3": {"zero_optimization": {"stage": 3}},
        "ZeRO stage 0": {"zero_optimization": {"stage": 0}},
        "an offloaded": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "bf16 weights": {**fine, "bf16": {"enabled": True}},
        "fp16 weights": {**fine, "fp16": {"enabled": True}},
        "its own optimizer": {**fine, "optimizer": {"type": "Adam"}},
    }
    for what, settings in refused.items():
        with pytest.raises(InputError, match=rf"asks for {what}.*\nUse ZeRO stage 1 or 2"):
            zero_config.set_up(deepspeed_of(settings), config, autocast=False)
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    zero_config.set_up(deepspeed_of({**fine, **off}), config, autocast=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=r"FSDP is asked for.*\nLaunch with torchrun"):
        setup.make_accelerator(config, target)


def test_zero2_on_a_cpu_runs_as_its_first_line_says(tmp_path):
    """Two real processes, from the launch line itself, without any C++ compiler on the path."""
    (recipe,) = [recipe for recipe in RECIPES if recipe.stem == "zero2_cpu"]
    variables, (_, _, *words) = launch_line(recipe)
    config = make_config(tmp_path, schedule={"steps": 2, "batch_size": 2})
    words[words.index("CONFIG")] = str(write_config(tmp_path / "run.yaml", config))
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    variables["PATH"] = str(tmp_path)
    done = subprocess.run(
        command,
        cwd=PACKAGE,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [len(line["rows"]) for line in metrics(tmp_path / "run") if "rows" in line] == [4, 4]
