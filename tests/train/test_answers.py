"""The preparation of answers: batches, resumption after a kill, settings that must not be mixed."""

import json
from pathlib import Path

import pytest
import torch
from chats import CHAT, make_config

from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.train.answers import answer_all, open_answers, plan_requests, read_prompts
from selfdraft.train.config import TrainConfig
from selfdraft.train.data import TOO_LONG, load_documents


class Answering:
    """Answers with the seed and the prompt's length; ends by Ctrl-C after `batches`."""

    def __init__(self, batches: int = 100) -> None:
        self.left, self.sizes = batches, []

    def __call__(self, prompts, answer, seeds, record):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.sizes.append([len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            record.add(row, {"hidden": torch.zeros(len(prompt) + 2, 4)})
        return [[seed, len(p), 5] for seed, p in zip(seeds, prompts, strict=True)]


def prompts_config(folder: Path, **data) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": "word " * (1 + i % 4) + str(i)} for i in range(10)]
    rows += [
        {"turns": ["first", "second"]},
        {"messages": CHAT},
        {"prompt": " "},
        {"prompt": "w" * 999},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"temperature": 0}, {"temperature": 0.8}]
    data = {"answers": answers, "answer_batch_size": 4, "max_new_tokens": 8} | data
    data |= {"prompts": str(folder / "prompts.jsonl"), "file": str(folder / "out" / "a.jsonl")}
    return make_config(folder, [], **data)


def prepare(config: TrainConfig, target: TargetModel, generate: Answering) -> list[dict]:
    prompts, skipped = read_prompts(config)
    assert sum(skipped.values()) == 1
    requests, too_long = plan_requests(config, target, prompts)
    assert too_long == {TOO_LONG: 1}
    done = open_answers(config, target, prompts)
    answer_all(config, target, requests, done, generate)
    return [json.loads(line) for line in config.answers_file.read_text().splitlines()]


def test_answers(chatml, tmp_path):
    config, generate = prompts_config(tmp_path), Answering()
    rows = prepare(config, chatml, generate)
    assert len(rows) == 24 and {(r["prompt_index"], r["temperature"]) for r in rows} == {
        (i, t) for i in range(12) for t in (0, 0.8)
    }
    for sizes in (generate.sizes[:3], generate.sizes[3:]):
        flat = [length for batch in sizes for length in batch]
        assert flat == sorted(flat, reverse=True) and max(map(len, sizes)) == 4
    assert all(r["answer_ids"] == [r["seed"], len(r["prompt_ids"]), 5] for r in rows)
    by_index = {r["prompt_index"]: r["prompt"] for r in rows}
    assert by_index[10] == "first" and by_index[11] == CHAT[:5]
    documents = load_documents(config, chatml)
    assert len(documents.train) == 24


@pytest.mark.parametrize("torn", ["", '{"prompt": "torn', '{"seed": 1}'])
def test_answers_go_on_after_a_kill(torn, chatml, tmp_path):
    whole = prepare(prompts_config(tmp_path / "whole"), chatml, Answering())
    config = prompts_config(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        prepare(config, chatml, Answering(batches=4))
    with config.answers_file.open("a") as file:
        file.write(torn)
    assert prepare(config, chatml, Answering()) == whole
    generate = Answering()
    assert prepare(config, chatml, generate) == whole and not generate.sizes


def test_answers_of_other_settings_are_not_mixed(chatml, llama3, tmp_path):
    config = prompts_config(tmp_path)
    prepare(config, chatml, Answering())
    with pytest.raises(InputError, match="other max_new_tokens: 8, now 9"):
        prepare(prompts_config(tmp_path, max_new_tokens=9), chatml, Answering())
    with pytest.raises(InputError, match="tokenizer"):
        prepare(config, llama3, Answering())
    with pytest.raises(InputError, match="tokenizer"):
        load_documents(config, llama3)
    more = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0}]
    assert len(prepare(prompts_config(tmp_path, answers=more), chatml, Answering())) == 36
    (tmp_path / "out" / "a.jsonl.meta.json").unlink()
    with pytest.raises(InputError, match="was not made by this command"):
        prepare(config, chatml, Answering())


def test_prompts_that_do_not_fit(chatml, tmp_path):
    config = prompts_config(tmp_path, max_length=3)
    prompts, _ = read_prompts(config)
    with pytest.raises(InputError, match=r"max_length 3.* leave 1 tokens"):
        plan_requests(config, chatml, prompts)
