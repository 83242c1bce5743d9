"""MTP and EAGLE from training to text: targets with a head width, a partial or a scaled rotation
of their own, and the kinds' settings."""

from pathlib import Path
from typing import Any

import pytest
from training import LLAMA, make_config, metrics, train

from selfdraft import Speculator

SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "partial": {"model_type": "stablelm", "partial_rotary_factor": 0.25},
    "scaled": {"rope_parameters": SCALED},
}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen3", {"kind": "mtp"}),
        ("qwen3", {"kind": "eagle", "lm_head": "own"}),
        ("partial", {"kind": "mtp", "modules": "depth"}),
        ("partial", {"kind": "eagle"}),
        ("scaled", {"kind": "mtp"}),
        ("scaled", {"kind": "eagle", "recycle": "normed", "feature_loss": 10.0}),
    ],
)
def test_train_save_load_generate(name: str, head: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(
        tmp_path, target={"random": LLAMA | TARGETS[name]}, head=head | {"draft_vocab": 64}
    )
    train(config)
    losses = [line["loss"] for line in metrics(config.output_dir) if "loss" in line]
    assert losses[-1] < losses[0]
    speculator = Speculator.from_pretrained(config.output_dir, drafter="heads")
    prompts = [[5, 9, 30], list(range(60, 90)), [7]]
    room = {"max_new_tokens": 20}
    plain = Speculator(speculator.target).generate(prompts, **room)
    assert speculator.generate(prompts, **room).token_ids == plain.token_ids
