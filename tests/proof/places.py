"""Where a run is killed: events that a pattern is found in, and how long one may last."""

from typing import NamedTuple


class Place(NamedTuple):
    pattern: str
    script: str
    seconds: float


PLACES = {
    "step": Place(r"selfdraft\.step", "train.py", 0.1),
    "save": Place(r"checkpoints/\.?step-", "train.py", 0.01),
    "cache": Place(r"features", "train.py", 0.05),
    "answers": Place(r"answers\.jsonl|recorded", "scripts/prepare_data.py", 0.3),
}
