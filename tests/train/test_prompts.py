"""Prompts that the target writes: whole turns, no two alike, and a file that is gone on with."""

import json
from pathlib import Path

import pytest
from chats import CHATML, FORGETFUL, LLAMA3, STRICT, bpe, make_config, make_target
from launch import write_config

from selfdraft.heads.errors import InputError
from selfdraft.inference.speculator import Generation
from selfdraft.inference.statistics import Stats
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import write_prompts as command
from selfdraft.train.answers import read_prompts
from selfdraft.train.config import TargetConfig
from selfdraft.train.prompts import Writer, turn_opening, write_prompts

LAW = {"temperature": 1.0}


def draw(numbers: list[int]) -> list[str | None]:
    """Every third is none, and each text comes twice, once in capitals; they have all kinds of
    breaks that a line of JSON may hold."""
    texts = [f"Te\u2028x\x85t {number // 2}" for number in numbers]
    texts = [text.upper() if n % 2 else text for n, text in zip(numbers, texts, strict=True)]
    return [None if n % 3 == 2 else text for n, text in zip(numbers, texts, strict=True)]


def write(path: Path, target: TargetModel, count: int, drawing=draw, **settings) -> list[dict]:
    write_prompts(target, path, count, 4, drawing, LAW | settings)
    return [json.loads(line) for line in path.open(encoding="utf-8")]


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
    target.tokenizer.chat_template = STRICT.replace("!=", "==")
    with pytest.raises(InputError, match="refuses the messages"):
        turn_opening(target)
    target.tokenizer.chat_template = None
    with pytest.raises(InputError, match="does not close a user's turn"):
        turn_opening(target)


def test_prompts_are_unlike_each_other(chatml, tmp_path):
    rows = write(tmp_path / "p.jsonl", chatml, 7)
    assert len(rows) == len({row["prompt"].casefold() for row in rows}) == 7
    assert all(row["draw"] % 3 != 2 for row in rows)


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
    path.write_text('{"prompt": "edited"}\n')
    with pytest.raises(InputError, match="line 1 has no prompt or not the number of its draw"):
        write(path, chatml, 9)


def test_a_target_that_writes_none_is_given_up(chatml, tmp_path):
    few = lambda seeds: ["Only this"] + [None] * (len(seeds) - 1)  # noqa: E731
    with pytest.raises(InputError, match="only 1 of 3 prompts came of 24 draws"):
        write(tmp_path / "p.jsonl", chatml, 3, few)
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 1


def test_what_is_no_whole_turn_is_no_prompt(chatml, monkeypatch):
    """One that is cut off, one that opens another turn, and one without a word."""
    mark, end = (chatml.tokenizer.convert_tokens_to_ids(m) for m in ("<|im_start|>", "<|im_end|>"))
    writer, word = Writer(chatml, 12, 1.0, 1.0), chatml.text_ids("The owl")
    ids = [[*word, end], word, [*word, mark, *word, end], [*chatml.text_ids(" 1."), end]]
    texts = [chatml.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    found = Generation(texts, ids, ["eos", "length", "eos", "eos"], Stats())
    monkeypatch.setattr(writer.speculator, "generate", lambda *_, **__: found)
    assert writer(list(range(4))) == ["The owl", None, None, None]


def test_other_seeds_draw_other_prompts(chatml, monkeypatch):
    asked = []
    for seed in (0, 1):
        writer = Writer(chatml, 2, 1.0, 1.0, seed)
        monkeypatch.setattr(writer.speculator, "generate", lambda *_, **k: asked.extend(k["seed"]))
        with pytest.raises(AttributeError):
            writer(list(range(1000)))
    assert len({*asked}) == 2000


def test_the_command(tmp_path, capsys, monkeypatch):
    """On a target that knows templates and nothing else, so that all of its turns are whole."""
    make_target(bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None)).model.save_pretrained(tmp_path)
    bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None).save_pretrained(tmp_path)
    monkeypatch.setattr(Writer, "__call__", lambda self, numbers: [f"Text {n}" for n in numbers])
    config = make_config(tmp_path, []).model_copy(
        update={"target": TargetConfig(model=str(tmp_path))}
    )
    write_config(tmp_path / "run.yaml", config)
    arguments = [str(tmp_path / "run.yaml"), "--output", str(tmp_path / "p.jsonl")]
    assert command.main([*arguments, "--count", "5"]) == 0
    assert "5 prompts; 64 draws" in capsys.readouterr().out
    prompts, skipped = read_prompts(
        config.model_copy(
            update={"data": config.data.model_copy(update={"prompts": str(tmp_path / "p.jsonl")})}
        )
    )
    assert [p.messages[0]["content"] for p in prompts] == [f"Text {n}" for n in range(5)]
    assert not skipped
    assert command.main([*arguments, "--count", "3"]) == 0
    assert "5 prompts; 0 draws" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--count", "0"], ["--top-p", "1.5"], ["--temperature", "inf"]])
def test_bad_numbers_are_two_lines(more, tmp_path, capsys):
    output = ["--output", str(tmp_path / "out" / "p.jsonl")]
    assert command.main(["configs/tiny.yaml", *output, *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2 and not list(tmp_path.iterdir())
