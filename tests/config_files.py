"""Config files for tests, and what is wrong with them."""

from pathlib import Path

import pytest

from selfdraft.train.config import ConfigError, load_config

MINIMAL = """
target: {model: some/model}
head: {kind: hydra}
schedule: {steps: 10}
output_dir: runs/x
"""


def write(tmp_path: Path, text: str = MINIMAL, **sections: str) -> Path:
    """A config file: `text`, and sections given as YAML text in place of the ones there."""
    lines = [line for line in text.splitlines() if line.split(":")[0] not in sections]
    lines += [f"{name}: {value}" for name, value in sections.items()]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    """The lines that name problems."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    first, *rest = str(caught.value).splitlines()
    if len(rest) == 1:  # one problem: two lines in all
        return [first.removeprefix(f"{path}: ")]
    assert first == f"{path}: {len(rest) - 1} problems"
    return [line.strip() for line in rest[:-1]]
