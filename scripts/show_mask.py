"""Shows what is learned from: rows of a config's data, the trained tokens coloured.

python scripts/show_mask.py CONFIG [key=value ...] [--rows N]
"""

from __future__ import annotations

import argparse
import itertools

from rich.console import Console
from rich.text import Text

from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.target import TargetModel
from selfdraft.train.config import TrainConfig, load_config
from selfdraft.train.data import check_data, load_documents
from selfdraft.train.packing import Document
from selfdraft.train.setup import describe, load_target

TRAINED = ("black on green", "black on bright_green")
"""Neighbouring tokens have unlike shades, so that their borders are seen."""


def coloured(document: Document, target: TargetModel) -> Text:
    """The row's text; trained tokens stand on green."""
    text = Text()
    shade = itertools.cycle(TRAINED)
    pairs = zip(document.ids, document.loss_mask, strict=True)
    for learned, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
        ids = [i for i, _ in group]
        if not learned:
            text.append(target.tokenizer.decode(ids), "dim")
            continue
        for piece in pieces(ids, target):
            text.append(piece.replace("\n", "⏎\n"), next(shade))
    return text


def pieces(ids: list[int], target: TargetModel) -> list[str]:
    """Texts of tokens; those that share a character stand together."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        text = target.tokenizer.decode(ids[start:end])
        if not text.endswith("�") or end == len(ids):
            found.append(text)
            start = end
    return found


def show(config: TrainConfig, rows: int, console: Console) -> int:
    """Prints `rows` rows, and what became of all others."""
    if rows < 0:
        raise InputError(f"--rows {rows}", "Give a number of rows, 0 or more.")
    check_data(config)
    target = load_target(config)
    documents = load_documents(config, target)
    found = sorted(documents.train + documents.held_out, key=lambda document: document.row)
    for document in found[:rows]:
        trained = sum(document.loss_mask)
        console.rule(f"row {document.row}: {trained} of {len(document.ids)} tokens are trained")
        console.print(coloured(document, target), soft_wrap=True)
    console.rule()
    console.print(describe(documents), highlight=False, markup=False)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses the command line; bad input is two lines on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="Show which tokens of the data are trained on.")
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="rows shown (default 3)")
    arguments = parser.parse_intermixed_args(argv)
    return exit_code(
        lambda: show(load_config(arguments.config, arguments.overrides), arguments.rows, Console())
    )


if __name__ == "__main__":
    raise SystemExit(main())
