"""The console command `selfdraft`: one name for train.py and the scripts.

selfdraft COMMAND ARGS
accelerate launch -m selfdraft.scripts.cli train ARGS       # in several processes
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

from selfdraft.heads.errors import InputError, exit_code, nearest

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "write-prompts": "let a config's target write prompts",
    "prepare-data": "let the target answer a config's prompts",
    "show-mask": "show which tokens of a config's data are trained on",
    "train": "train heads by a config",
    "generate": "answer a prompt with trained heads",
    "bench": "time trained heads against other ways to generate",
    "bench-rows": "time trees of several sizes in batches of several rows",
    "bench-train": "time training, cached and not",
    "compare-heads": "train every head kind for the same minutes and time all of them",
    "sweep": "train variants of a config: what each gains",
    "prove-greedy": "compare greedy text with plain decoding's, whatever drafts it",
}


def usage() -> str:
    """The commands, a line each."""
    rows = [f"  {name:<14}{does}" for name, does in COMMANDS.items()]
    return "\n".join(["usage: selfdraft COMMAND ARGS  (COMMAND --help tells its own)", *rows])


def run(argv: list[str]) -> int:
    """Hands `argv` on to its command, which is loaded only now.

    Raises InputError for an unknown command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise InputError(f"There is no command {name!r}.", nearest(name, COMMANDS))
    sys.argv = [f"selfdraft {name}", *rest]  # argparse takes the name that it prints from here
    if name == "train":  # the package selfdraft.train hides train.py from an import
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        return 0
    return int(import_module(f"selfdraft.scripts.{name.replace('-', '_')}").main(rest))


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code; bad input is two lines on stderr and 2."""
    return exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
