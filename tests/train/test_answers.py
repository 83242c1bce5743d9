"""The preparation of answers: batches, resumption after a kill, settings that must not be mixed."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from chats import CHAT, make_config
from fixtures import LLAMA, make_head, tiny

from selfdraft.heads import save_head
from selfdraft.heads.errors import InputError
from selfdraft.inference.target import TargetModel
from selfdraft.scripts import prepare_data
from selfdraft.train.answers import (
    answer_all,
    check_answers,
    close_answers,
    open_answers,
    plan_requests,
    read_prompts,
)
from selfdraft.train.config import DataConfig, TargetConfig, TrainConfig
from selfdraft.train.data import TOO_LONG, load_documents
from selfdraft.train.recording import RecordedStates


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
    close_answers(config, target, prompts, too_long)
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


def test_what_is_trained_on_is_what_the_config_asks_for(chatml, tmp_path):
    """All answers, to its prompts; whatever is there without prompts, or in a file of one's own."""
    config = prompts_config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, chatml, Answering(batches=4))
    with pytest.raises(InputError, match=r"has not got all answers yet\nRun scripts/prepare_data"):
        check_answers(config, chatml)
    check_answers(prompts_config(tmp_path).model_copy(update={"data": own_file(config)}), chatml)
    prepare(config, chatml, Answering())
    check_answers(config, chatml)
    open_answers(config, chatml, read_prompts(config)[0])  # a second run that is ended at once
    check_answers(config, chatml)
    check_answers(config.model_copy(update={"seed": 5}), chatml)
    for other, named in ({"limit": 4}, "prompts"), ({"max_new_tokens": 9}, "max_new_tokens"):
        with pytest.raises(InputError, match=rf"other {named}: .*\nRemove .*data\.prompts=null"):
            check_answers(prompts_config(tmp_path, **other), chatml)
    more = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0}]
    with pytest.raises(InputError, match="has not got all answers"):
        check_answers(prompts_config(tmp_path, answers=more), chatml)
    (tmp_path / "out" / "a.jsonl.meta.json").unlink()
    check_answers(prompts_config(tmp_path, limit=4), chatml)
    assert len(load_documents(prompts_config(tmp_path, limit=4), chatml).train) == 4


def own_file(config: TrainConfig) -> DataConfig:
    """The data of `config` without its prompts."""
    return config.data.model_copy(update={"prompts": None})


def test_more_room_for_prompts_asks_for_the_answers_that_are_missing(chatml, tmp_path):
    wider = prompts_config(tmp_path)
    prompts, _ = read_prompts(wider)
    every, unfit = plan_requests(wider, chatml, prompts)
    narrow = prompts_config(tmp_path, max_length=len(every[0].ids) + 1)
    for config in (narrow, wider):
        with pytest.raises(InputError, match=r"has not got all answers yet\nRun scripts/prepare"):
            open_answers(config, chatml, prompts)
            check_answers(config, chatml)
        requests, unfit = plan_requests(config, chatml, prompts)
        done = open_answers(config, chatml, prompts)
        answer_all(config, chatml, requests, done, Answering())
        close_answers(config, chatml, prompts, unfit)
        assert unfit[TOO_LONG] == (1 if config is wider else 2)
        check_answers(narrow, chatml)
    assert len(done) == len(every) - 2 and len(requests) == len(every)
    check_answers(wider, chatml)


def test_answers_to_other_tools_are_other_answers(chatml, tmp_path):
    config, file = prompts_config(tmp_path), tmp_path / "prompts.jsonl"
    prepare(config, chatml, Answering())
    was = file.read_text()
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = json.dumps({"messages": CHAT})
    assert asked in was
    file.write_text(was.replace(asked, json.dumps({"messages": CHAT, "tools": tools})))
    for refusing in (check_answers, partial(prepare, generate=Answering())):
        with pytest.raises(InputError, match="was made with other prompts"):
            refusing(config, chatml)


def test_prompts_that_do_not_fit(chatml, tmp_path):
    config = prompts_config(tmp_path, max_length=3)
    prompts, _ = read_prompts(config)
    with pytest.raises(InputError, match=r"max_length 3.* leave 1 tokens"):
        plan_requests(config, chatml, prompts)


# -- real processes, real drafters ----------------------------------------------------------------


def tiny_config(folder: Path, **data) -> TrainConfig:
    """Short prompts to the tiny random target, greedy and sampled, in batches of 4."""
    folder.mkdir()
    rows = [{"prompt": "word " * (1 + i % 5) + str(i)} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "prompts": str(folder / "prompts.jsonl"),
        "answers": [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}],
        "max_new_tokens": 24,
        "max_length": 96,
        "answer_batch_size": 4,
    } | data
    target = {"random": LLAMA, "dtype": "float32", "device": "cpu"}
    return make_config(folder, [], **data).model_copy(update={"target": TargetConfig(**target)})


VICTIM = """
import os, signal, sys
from selfdraft.scripts import prepare_data
from selfdraft.train import answers

left, row = int(sys.argv[2]), answers._row

def dying(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return row(*arguments)

answers._row = dying
prepare_data.main(sys.argv[1:2])
"""


def test_a_killed_process_leaves_nothing_out_and_nothing_twice(tmp_path):
    """SIGKILL inside the third batch, and a torn line inside the second: the file is the unbroken
    run's to the byte."""
    config = tiny_config(tmp_path / "killed", file=str(tmp_path / "killed" / "a.jsonl"))
    file, run = config.answers_file, tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", VICTIM, str(run), "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    file.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    assert prepare_data.prepare(config) == 0
    whole = tiny_config(tmp_path / "whole", file=str(tmp_path / "whole" / "a.jsonl"))
    assert prepare_data.prepare(whole) == 0
    assert file.read_bytes() == whole.answers_file.read_bytes()
    seeds = [json.loads(line)["seed"] for line in file.open()]
    assert len(seeds) == len(set(seeds)) == 40
    states = RecordedStates(config, tiny())
    documents = load_documents(config, tiny())
    assert all(states.get(d.ids) for d in documents.train)  # no second pass for the cache


def answered(config: TrainConfig) -> list[dict]:
    prepare_data.prepare(config)
    return [json.loads(line) for line in config.answers_file.open()]


@pytest.mark.parametrize("drafter", ["heads", "ngram"])
def test_drafted_answers_are_the_targets_own(drafter, tmp_path):
    """Greedy answers are equal with any drafter; sampled ones are there, of the same law."""
    plain = answered(tiny_config(tmp_path / "plain", file=str(tmp_path / "plain.jsonl")))
    if drafter == "heads":
        drafter = str(tmp_path / "heads")
        save_head(drafter, make_head("hydra", tiny().spec, taps=[1]))
    config = tiny_config(
        tmp_path / "drafted", file=str(tmp_path / "drafted.jsonl"), answers_drafter=drafter
    )
    drafted = answered(config)
    assert len(drafted) == len(plain) == 40
    for row, other in zip(drafted, plain, strict=True):
        assert row["seed"] == other["seed"]
        assert row["temperature"] > 0 or row["answer_ids"] == other["answer_ids"]
    # Heads that read a layer which is not kept leave the states to the cache to compute.
    kept = RecordedStates(config, tiny()).get(drafted[0]["prompt_ids"] + drafted[0]["answer_ids"])
    assert (kept is None) == ("heads" in drafter)


def test_progress_shows_speed_and_time_left(tmp_path, capsys):
    answered(tiny_config(tmp_path / "p", file=str(tmp_path / "a.jsonl")))
    out, err = capsys.readouterr()
    assert "tokens/s" in err and "40/40" in err and "<00:00" in err and "tokens/s" in out
