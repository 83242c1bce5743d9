"""Prompts that the target writes: whole turns, no two alike, and a file that is gone on with."""

import json
from pathlib import Path

import pytest
from chats import CHATML, FORGETFUL, LLAMA3, bpe, make_target

from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import write_prompts as command
from selfdraft.train.prompts import Writer, turn_opening, write_prompts

LAW = {"temperature": 1.0}


def draw(seeds: list[int]) -> list[str | None]:
    """Every third is none, and each text comes twice, once in capitals."""
    texts = [f"Text {seed // 2}".upper() if seed % 2 else f"Text {seed // 2}" for seed in seeds]
    return [None if seed % 3 == 2 else text for seed, text in zip(seeds, texts, strict=True)]


def write(path: Path, target: TargetModel, count: int, drawing=draw, **settings) -> list[dict]:
    write_prompts(target, path, count, 10, 4, drawing, LAW | settings)
    return [json.loads(line) for line in path.open()]


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_the_opening_is_what_stands_before_a_users_words(template):
    marks = ["<|im_start|>", "<|im_end|>"] if template == CHATML else []
    marks = marks or ["<|head|>", "<|/head|>", "<|bos|>", "<|eot|>"]
    target = make_target(bpe(template, marks, None if template == CHATML else "<|bos|>"))
    opening = turn_opening(target)
    whole = target.chat_ids([{"role": "user", "content": "How many legs?"}], False)
    assert whole[: len(opening)] == opening
    rest = target.tokenizer.decode(whole[len(opening) :])
    assert rest.strip() in ("How many legs?<|im_end|>", "How many legs?<|eot|>")


def test_a_turn_that_nothing_closes_is_refused():
    with pytest.raises(InputError, match="does not close a user's turn"):
        turn_opening(make_target(bpe(FORGETFUL, ["<|end|>"], None)))
    target = make_target(bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None))
    target.tokenizer.chat_template = None
    with pytest.raises(InputError, match="does not close a user's turn"):
        turn_opening(target)


def test_prompts_are_unlike_each_other(chatml, tmp_path):
    rows = write(tmp_path / "p.jsonl", chatml, 7)
    assert len(rows) == len({row["prompt"].casefold() for row in rows}) == 7
    assert all(row["seed"] >= 10 and row["seed"] % 3 != 2 for row in rows)


def test_a_file_that_was_begun_is_gone_on_with(chatml, tmp_path):
    whole = write(tmp_path / "whole.jsonl", chatml, 9)
    path = tmp_path / "p.jsonl"
    write(path, chatml, 4)
    with path.open("a") as file:
        file.write('{"prompt": "torn')
    assert write(path, chatml, 9) == whole
    asked = []
    assert write(path, chatml, 9, asked.append) == whole and not asked
    with pytest.raises(InputError, match=r"made with other temperature: 1.0, now 0.5"):
        write(path, chatml, 12, temperature=0.5)


def test_a_target_that_writes_none_is_given_up(chatml, tmp_path):
    few = lambda seeds: ["Only this"] + [None] * (len(seeds) - 1)  # noqa: E731
    with pytest.raises(InputError, match="only 1 of 3 prompts came of 24 draws"):
        write(tmp_path / "p.jsonl", chatml, 3, few)
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 1


def test_a_turn_that_is_not_closed_is_no_prompt(chatml):
    writer = Writer(chatml, 12, 1.0, 1.0)
    texts = writer(list(range(40)))
    cut = writer.speculator.generate(
        [writer.opening] * 40, seed=list(range(40)), max_new_tokens=12, do_sample=True
    )
    for text, reason in zip(texts, cut.finish_reasons, strict=True):
        assert text is None or reason == "eos"
    assert "length" in cut.finish_reasons


@pytest.mark.parametrize("more", [["--count", "0"], ["--top-p", "1.5"], ["--temperature", "nan"]])
def test_bad_numbers_are_two_lines(more, tmp_path, capsys):
    output = ["--output", str(tmp_path / "out" / "p.jsonl")]
    assert command.main(["configs/tiny.yaml", *output, *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2 and not list(tmp_path.iterdir())
