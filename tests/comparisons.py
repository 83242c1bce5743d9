"""What a command that compares trainings is given in a test."""

import json
from pathlib import Path

from launch import write_config
from training import make_config, write_data

PROMPTS = [("why", "the cat sat on"), ("how", "a big red hat ran"), ("why", "in the mat")]


def place(folder: Path, **sections) -> list[str]:
    """Data, prompts and a config; the arguments that name them."""
    write_data(folder / "data.jsonl")
    lines = [json.dumps({"category": c, "prompt": p}) + "\n" for c, p in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    write_config(folder / "run.yaml", make_config(folder, **sections))
    named = {"--prompts": folder / "prompts.jsonl", "--output": folder / "all"}
    named |= {"--json": folder / "results" / "heads.json", "--max-new-tokens": 12}
    return [str(folder / "run.yaml"), *(str(part) for pair in named.items() for part in pair)]
