"""What is installed: the wheel's files, its console command, and an import that loads little."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from selfdraft.scripts import cli

ROOT = Path(__file__).parents[1]
PACKAGES = ["heads", "inference", "train", "scripts"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of this tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("build") / "any-name"
    copy.mkdir()
    for name in ["pyproject.toml", "README.md", "LICENSE", "__init__.py", "train.py"]:
        shutil.copy(ROOT / name, copy)
    for name in [*PACKAGES, "configs"]:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    return zipfile.ZipFile(next((copy / "dist").glob("selfdraft-*.whl")))


def test_the_wheel_holds_the_packages_and_their_data_only(wheel: zipfile.ZipFile) -> None:
    files = {p for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    for kind in ("yaml", "json", "jsonl"):
        files |= set((ROOT / "configs").rglob(f"*.{kind}"))
    files |= {ROOT / "__init__.py", ROOT / "train.py"}
    expected = {f"selfdraft/{p.relative_to(ROOT)}" for p in files}
    assert any(name.startswith("selfdraft/configs/prompts/") for name in expected)
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_the_wheel_names_its_command_and_licence(wheel: zipfile.ZipFile) -> None:
    info = next(n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n)
    points = configparser.ConfigParser()
    points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert points["console_scripts"]["selfdraft"] == "selfdraft.scripts.cli:main"
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_installed_copy_imports_without_torch(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import selfdraft, sys; print(selfdraft.__file__, 'torch' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert printed.split() == [str(tmp_path / "selfdraft" / "__init__.py"), "False"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["selfdraft"])  # put back afterwards
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_an_unknown_command_is_two_lines_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    met, advice = capsys.readouterr().err.splitlines()
    assert "'trian'" in met
    assert "Did you mean 'train'?" in advice


def test_no_command_prints_the_usage_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: selfdraft COMMAND" in capsys.readouterr().err
