"""The command train.py: usage and bad input."""

import runpy
import subprocess
import sys

import pytest
import torch
from launch import finish, start, write_config
from training import make_config

from selfdraft.heads import errors
from selfdraft.train.config import PACKAGE


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: accelerate launch train.py CONFIG"),
        ([], 2, "usage: accelerate launch train.py CONFIG"),
        (["no.yaml"], 2, "no.yaml does not exist"),
        (["configs/tiny.yaml", "schedule.stps=3"], 2, "Did you mean 'steps'"),
    ],
)
def test_the_command_line(monkeypatch, capsys, arguments, code, said):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(PACKAGE / "train.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert caught.value.code == code
    assert said in (printed.err if code else printed.out)


def test_a_run_takes_subnormal_numbers_for_0_in_all_its_threads(tmp_path):
    """They would make its steps slower; a run from Python leaves its caller's process alone."""
    path = write_config(tmp_path / "run.yaml", make_config(tmp_path))
    code = (
        "import runpy, sys, torch\n"
        "from selfdraft.train import trainer\n"
        "torch.set_num_threads(2)\n"
        "product = lambda: torch.full((1 << 20,), 1e-39) * 1.0\n"
        "trainer.run = lambda config: print(product().count_nonzero())\n"
        f"sys.argv = ['train.py', {str(path)!r}]\n"
        f"runpy.run_path({str(PACKAGE / 'train.py')!r}, run_name='__main__')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "tensor(0)\n", found.stderr
    assert (torch.full((2,), 1e-39) * 1.0).count_nonzero() == 2


def test_bad_input_is_said_once_whatever_the_number_of_processes(tmp_path):
    config = make_config(tmp_path, data={"max_length": 5})
    path = write_config(tmp_path / "run.yaml", config)
    # torchrun's own exit code is 1; its report names ours.
    printed = finish(start(2, PACKAGE / "train.py", str(path)), code=1)
    assert printed.count("Raise data.max_length.") == 1
    assert "exitcode  : 2" in printed


def test_what_one_process_alone_meets_is_said_after_a_while(monkeypatch, capsys):
    def bad() -> int:
        raise errors.InputError("this was met", "do that")

    waits: list[float] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    assert errors.exit_code(bad) == 2 and waits == [errors.PATIENCE]
    assert capsys.readouterr().err == "this was met\ndo that\n"
