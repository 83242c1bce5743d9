"""scripts/generate.py: streams, compares with plain decoding, and says what heads were worth."""

import io
from pathlib import Path

import pytest
from training import make_config, train

from selfdraft.heads import Plan
from selfdraft.inference.planner import default_plan
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import drafting, generate

TOKENS = 128


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    """Heads that were trained on rows of 48 tokens at most, for one step."""
    folder = tmp_path_factory.mktemp("heads")
    data, schedule = {"max_length": 48, "overlong": "cut"}, {"steps": 1, "warmup": 0}
    train(make_config(folder, data=data, schedule=schedule))
    return folder / "run"


def asked(heads: Path, *more: str) -> list[str]:
    return [str(heads), "--max-new-tokens", str(TOKENS), *more]


def test_heads_used_past_their_training_stay_right_and_say_so_p5(heads, capsys):
    arguments = asked(heads, "--prompt", "tell me about cats", "--compare", "--drafter", "heads")
    assert generate.main(arguments) == 0
    text, summary = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text and summary.splitlines()[-1] == "identical"
    assert f"plain: {TOKENS} tokens" in summary and "speedup " in summary
    assert f"trained on rows of up to 48 tokens: in {TOKENS - 1} rounds 0 of their" in summary
    assert "they only cost time here; drafter ngram or none does without them" in summary


def test_heads_that_help_are_not_called_useless(heads, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("tell me about cats"))
    assert generate.main(asked(heads, "--temperature", "0.7", "--seed", "1", "--compare")) == 0
    shown = capsys.readouterr().out
    assert "both texts follow the target's law" in shown and "identical" not in shown
    assert "tokens by " in shown  # of each drafter of the merged tree


def test_other_greedy_ids_are_exit_code_1(heads, capsys, monkeypatch):
    """Also where the texts, which leave special tokens out, are the same."""
    real = Speculator.generate

    def drifting(spec, prompt, **settings):
        out = real(spec, prompt, **settings)
        if spec.drafter.name == "plain":
            out.token_ids[0].append(spec.target.tokenizer.eos_token_id)
        return out

    monkeypatch.setattr(Speculator, "generate", drifting)
    assert generate.main(asked(heads, "--prompt", "cats", "--compare")) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT, plain decoding wrote:" in shown and shown.endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "cats", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "cats", "--temperature", "-1"], "temperature"),
        (["--prompt", "cats", "--top-k", "-1"], "top_k"),
        (["--prompt", "cats", "--top-p", "2"], "top_p"),
        (["--prompt", "cats", "--drafter", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_two_lines(heads, capsys, monkeypatch, more, words):
    """Before a target is loaded."""
    monkeypatch.setattr(TargetModel, "load", lambda *a, **k: pytest.fail("loaded the target"))
    assert generate.main(asked(heads, *more)) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 2


def test_the_plan_is_the_one_that_is_asked_for(heads):
    spec = drafting.load(generate.parser().parse_args([str(heads)]))
    assert spec.plan == default_plan(spec.drafter, spec.target) and spec.plan.nodes
    spec = drafting.load(generate.parser().parse_args([str(heads), "--nodes", "4"]))
    assert spec.plan == Plan(spec.drafter.max_depth, nodes=4)


def test_of_a_hub_repository_the_two_files_of_a_head_are_fetched(heads, monkeypatch):
    """Beside them may lie features and checkpoints, which are JSON and safetensors too."""
    fetched = []

    def snapshot(name, allow_patterns):
        fetched.append((name, allow_patterns))
        return str(heads)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert Speculator.from_pretrained("owner/head").drafter.max_depth > 0
    assert fetched == [("owner/head", ["head.json", "model.safetensors"])]
