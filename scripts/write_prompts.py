"""Lets a config's target write prompts: python scripts/write_prompts.py CONFIG --output FILE

For who has none: data.prompts may name the file.  Its license is a matter of the target's.  A
second run goes on where one was ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.target import TargetModel
from selfdraft.train.config import load_config
from selfdraft.train.locks import locked
from selfdraft.train.prompts import Writer, write_prompts


def run(options: argparse.Namespace) -> int:
    """Draws prompts and says how many draws it took.

    Raises:
        InputError: a bad number, a file of other means, or a target that writes no prompts.
    """
    for name in ("count", "max_tokens", "batch_size", "temperature", "top_p"):
        value = getattr(options, name)
        most = 1.0 if name == "top_p" else sys.float_info.max
        if not 0 < value <= most:
            shown = f"--{name.replace('_', '-')} is {value}"
            raise InputError(shown, "Give more than 0" + (", at most 1." if most == 1 else "."))
    config, path = load_config(options.config, options.overrides), Path(options.output)
    with locked(path, "Give another --output.", file=True):
        target = TargetModel.load(**config.target.model_dump(), seed=config.seed)
        law = {n: getattr(options, n) for n in ("max_tokens", "temperature", "top_p")}
        law |= {"seed": config.seed}
        writer, begin = Writer(target, **law), time.perf_counter()
        count, drawn = write_prompts(target, path, options.count, options.batch_size, writer, law)
    seconds = time.perf_counter() - begin
    print(f"{path}: {count} prompts; {drawn} draws in {seconds:.0f} s")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 for bad input."""
    cli = argparse.ArgumentParser(prog="write_prompts.py", description=__doc__.splitlines()[0])
    cli.add_argument("config", help="a YAML file; its target writes")
    cli.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1")
    cli.add_argument("--output", required=True, help="JSONL file, a prompt a line")
    cli.add_argument("--count", type=int, default=1000, help="prompts that the file shall have")
    cli.add_argument(
        "--max-tokens", type=int, default=64, help="of a prompt; longer ones are dropped"
    )
    cli.add_argument("--temperature", type=float, default=1.0)
    cli.add_argument("--top-p", type=float, default=0.95)
    cli.add_argument("--batch-size", type=int, default=64, help="draws at once")
    options = cli.parse_intermixed_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
