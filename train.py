"""Trains drafting heads: accelerate launch train.py CONFIG [key=value ...]"""

import sys

from selfdraft.heads.errors import exit_code
from selfdraft.train.config import load_config

USAGE = """usage: accelerate launch train.py CONFIG [key=value ...]

CONFIG is a YAML file such as configs/quickstart.yaml.  key=value overrides one of its keys, with a
dotted path and the value read as YAML:

  accelerate launch train.py configs/tiny.yaml schedule.steps=200 optim.lr=2e-3 resume=latest

scripts/prepare_data.py CONFIG writes the data that it trains on.
"""


def main() -> int:
    """Exit code of the command: 0, 2 on bad input, 130 or 143 when it was stopped and saved."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, end="")
        return 0
    if len(sys.argv) < 2:
        print(USAGE, end="", file=sys.stderr)
        return 2
    config = load_config(sys.argv[1], sys.argv[2:])
    from selfdraft.train.setup import flush_subnormals  # after the config: its errors come at once
    from selfdraft.train.trainer import run

    flush_subnormals()
    run(config)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
