"""The command train.py: usage and bad input."""

import runpy
import sys

import pytest

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
