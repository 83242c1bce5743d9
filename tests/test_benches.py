"""The benchmarks' commands on a tiny target: what they print and save, and what they refuse."""

import argparse
import json
from pathlib import Path

import pytest
from chats import CHAT, STRICT, bpe, make_target
from fixtures import make_head, tiny

from selfdraft.heads.checkpoint import save_head
from selfdraft.scripts import bench, bench_rows, drafting

NEW_TOKENS = 12
DATED = "{{ strftime_now('%d %b %Y') }}{% for t in tools or [] %}{{ t['name'] }}{% endfor %}"


@pytest.fixture
def heads(tmp_path: Path) -> str:
    """A folder with a head of the tiny target."""
    save_head(tmp_path / "heads", make_head("hydra", tiny().spec, depth=3, scale=0.5))
    return str(tmp_path / "heads")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts of two categories, and a line that is none."""
    rows = [{"prompt": "abcabcabc", "category": c} for c in ("copy", "copy", "other")]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "{"]) + "\n")
    return str(path)


def test_bench_compares_all_ways(heads: str, prompts: str, tmp_path: Path, capsys) -> None:
    report = tmp_path / "report.json"
    arguments = [heads, "--prompts", prompts, "--max-new-tokens", str(NEW_TOKENS)]
    against = ["--against", "plain,hf,hf_lookup,ngram,heads", "--json", str(report)]
    assert bench.main(arguments + against) == 0
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert set(rows) == {"plain", "hf", "hf_lookup", "ngram", "hydra", "hydra+ngram"}
    assert {row["identical"] for row in rows.values()} == {"3/3"}
    assert len({row["tokens"] for row in rows.values()}) == 1
    assert rows["plain"]["tokens_per_round"] == rows["hf"]["tokens_per_round"] == 1
    for row in rows.values():
        rate = row["tokens"] / row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(rate)
        assert row["speedup_vs_plain"] == pytest.approx(rate / rows["plain"]["tokens_per_second"])
    printed = capsys.readouterr().out
    assert "skipped prompts: 1 × " in printed
    assert "hydra+ngram" in printed


def test_prompts_are_read_as_in_training(tmp_path: Path, capsys) -> None:
    """What the template refuses is counted, it is given the tools, and the day is always one."""
    target = make_target(bpe(DATED + STRICT, ["<|im_end|>"], None))
    refused = {"messages": [{"role": "system", "content": "x"}, CHAT[0]]}
    rows = [refused, {"messages": CHAT[:1], "tools": [{"name": "weather"}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts, _ = bench.read_prompts(str(path), None, target, 4)
    (text,) = map(target.tokenizer.decode, prompts)
    assert text.startswith("01 Jan 2026weather")
    assert "1 × the chat template refuses the messages" in capsys.readouterr().out


def test_rows_are_timed_by_tree_size(heads: str, prompts: str, tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    arguments = [heads, "--prompts", prompts, "--max-new-tokens", str(NEW_TOKENS)]
    sizes = ["--rows", "1,2", "--sizes", "2,5", "--json", str(report)]
    assert bench_rows.main(arguments + sizes) == 0
    rows = json.loads(report.read_text())["rows"]
    wanted = [(batch, size) for batch in (1, 2) for size in (0, 2, 5, "default")]
    assert [(row["rows"], row["nodes"]) for row in rows] == wanted
    assert {row["identical"] for row in rows} == {"3/3"}
    assert [row["speedup_vs_plain"] for row in rows if row["nodes"] == 0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "1,x"], "--rows"),
        (["--sizes", "-1"], "too small"),
        (["--rows", "0"], "too small"),
        (["--max-new-tokens", "0"], "too small"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_refused(heads: str, prompts: str, arguments, said: str, capsys) -> None:
    assert bench_rows.main([heads, "--prompts", prompts, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 2
    assert said in error[0]


def test_heads_are_widened_where_that_is_asked_for(prompts: str, tmp_path: Path, capsys) -> None:
    """And where they have something to widen."""
    narrow = make_head("hydra", tiny().spec, depth=3, scale=0.5, draft_ids=[0, 40, 80])
    save_head(tmp_path / "narrow", narrow)
    cli, report = argparse.ArgumentParser(), tmp_path / "report.json"
    drafting.add_options(cli)
    for more in ([], ["--widen"]):
        arguments = [str(tmp_path / "narrow"), "--drafter", "heads", *more]
        assert drafting.load(cli.parse_args(arguments)).drafter.widen == bool(more)
        arguments += ["--prompts", prompts, "--max-new-tokens", str(NEW_TOKENS)]
        assert bench.main([*arguments, "--against", "plain", "--json", str(report)]) == 0
        found = json.loads(report.read_text())
        assert found["conditions"]["widened"] == bool(more)
        assert {row["identical"] for row in found["rows"]} == {"3/3"}
    assert bench.main([*arguments, "--drafter", "ngram"]) == 2
    assert "widen is asked for, and drafter 'ngram' has no heads" in capsys.readouterr().err


def test_heads_that_the_drafter_leaves_out(heads: str, prompts: str, capsys) -> None:
    """A folder that is given is not called missing."""
    arguments = [heads, "--prompts", prompts, "--drafter", "ngram", "--against", "plain,heads"]
    assert bench.main(arguments) == 2
    met, advice = capsys.readouterr().err.strip().splitlines()
    assert "drafter ngram" in met and "--drafter" in advice
