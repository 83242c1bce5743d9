"""Documents, loss masks, batches, the order of a run, and the preparation of answers."""

from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from chats import CHAT, CHATML, STRICT, bpe, make_config, make_target, prepared
from safetensors import SafetensorError

from selfdraft.heads.errors import InputError, exit_code
from selfdraft.inference.target import TargetModel
from selfdraft.train.data import CUT_AWAY, TOO_LONG, check_data, load_documents, token_counts
from selfdraft.train.packing import Document, collate, order


def spans(document: Document, target: TargetModel) -> list[str]:
    """Texts of the runs of loss tokens."""
    pieces: list[list[int]] = []
    for previous, (i, learned) in zip(
        [False, *document.loss_mask],
        zip(document.ids, document.loss_mask, strict=True),
        strict=False,
    ):
        if learned:
            pieces += [] if previous else [[]]
            pieces[-1].append(i)
    return [target.tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_mask_is_the_assistants_text(name, tmp_path, request):
    """D6: for unlike tokenizers the masked text is what the assistant said, and its end."""
    target = request.getfixturevalue(name)
    (document,) = load_documents(make_config(tmp_path, [{"messages": CHAT}]), target).train
    end = target.tokenizer.eos_token
    assert spans(document, target) == [CHAT[i]["content"] + end for i in (1, 3, 5)]
    assert 0 < sum(document.loss_mask) < len(document.ids)


def test_one_bos(llama3, tmp_path):
    """D8: one BOS; a training row begins with the ids that generation starts from; EOS stays."""
    (document,) = load_documents(make_config(tmp_path, [{"messages": CHAT[:2]}]), llama3).train
    tokenizer = llama3.tokenizer
    template = tokenizer.apply_chat_template(CHAT[:2], tokenize=True, return_dict=True)["input_ids"]
    prompt = llama3.chat_ids(CHAT[:1])
    assert document.ids == template
    assert document.ids[: len(prompt)] == prompt
    for ids in (document.ids, prompt, template):
        assert ids.count(tokenizer.bos_token_id) == 1
    assert document.ids[-1] == tokenizer.eos_token_id and document.loss_mask[-1]


@pytest.mark.parametrize(
    ("template", "first", "reason"),
    [
        (STRICT, [CHAT[1], *CHAT[:2]], "the chat template refuses the messages"),
        (CHATML.replace("<|im_start|>assistant", "Bot:"), CHAT[:2], "generation prompt"),
    ],
)
def test_templates_that_cannot_be_masked(template, first, reason, tmp_path):
    target = make_target(bpe(template, ["<|im_start|>", "<|im_end|>"], None))
    rows = [{"messages": first}, prepared(5, 5)]
    documents = load_documents(make_config(tmp_path, rows), target)
    assert [d.row for d in documents.train] == [2]
    assert [reason in key for key in documents.skipped] == [True]


def test_mask_of_prepared_rows(chatml, tmp_path):
    (document,) = load_documents(make_config(tmp_path, [prepared(5, 3)]), chatml).train
    assert document.ids == [10, 11, 12, 13, 14, 50, 51, 52]
    assert document.loss_mask == [False] * 5 + [True] * 3


def test_too_long_rows_are_cut_or_dropped(chatml, tmp_path):
    """D12a, T4a: cut and counted; dropped where no loss is left."""
    rows = [prepared(10, 50), prepared(30, 5), prepared(5, 5), prepared(19, 5)]
    documents = load_documents(make_config(tmp_path, rows, max_length=20), chatml)
    assert [(d.row, len(d.ids)) for d in documents.train] == [(1, 20), (3, 10)]
    assert documents.skipped == {CUT_AWAY: 2} and documents.cut == 1
    config = make_config(tmp_path, rows, max_length=20, overlong="drop")
    documents = load_documents(config, chatml)
    assert [d.row for d in documents.train] == [3]
    assert documents.skipped == {TOO_LONG: 3} and documents.cut == 0


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_cut_inside_a_turn_keeps_its_loss(name, tmp_path, request):
    """D5a: wherever in the last turn the row ends, what is left of it is trained on."""
    target = request.getfixturevalue(name)
    (whole,) = load_documents(make_config(tmp_path, [{"messages": CHAT}]), target).train
    first = len(whole.ids) - whole.loss_mask[::-1].index(False, 3)
    *before, last = spans(whole, target)
    for length in range(first + 1, len(whole.ids)):
        config = make_config(tmp_path, [{"messages": CHAT}], max_length=length)
        (cut,) = load_documents(config, target).train
        assert cut.loss_mask == whole.loss_mask[:length] and cut.loss_mask[-1]
        *kept, part = spans(cut, target)
        assert kept == before and part and last.startswith(part)


def test_no_loss_token_left(chatml, tmp_path):
    """T4b: an error before training that names max_length."""
    with pytest.raises(InputError, match="max_length"):
        load_documents(make_config(tmp_path, [prepared(30, 5)] * 3, max_length=20), chatml)


def test_target_too_small(chatml, tmp_path):
    """D12b, c: both numbers are named."""
    config = make_config(tmp_path, [prepared(5, 5)], max_length=300)
    with pytest.raises(InputError, match=r"300 .* 256 positions"):
        load_documents(config, chatml)
    size = len(chatml.tokenizer)
    small = make_target(chatml.tokenizer, vocab_size=size - 1)
    with pytest.raises(InputError, match=rf"{size} ids, the target only {size - 1} embeddings"):
        load_documents(make_config(tmp_path, [prepared(5, 5)]), small)
    row = prepared(5, 5) | {"answer_ids": [1, 384]}
    with pytest.raises(InputError, match=r"row 1 has token id 384.*\n?.*has 384"):
        load_documents(make_config(tmp_path, [row]), chatml)


BAD = {
    "{": "not JSON",
    "": "an empty line",
    "[1]": "not a JSON object",
    '{"a": 1}': "no prompt, messages or conversations, or an empty one",
    '{"prompt": "\\ud800", "prompt_ids": [1], "answer_ids": [1, 2]}': "not Unicode text",
    '{"prompt_ids": [1], "answer_ids": []}': "answer_ids is no list of ids, or empty",
    '{"prompt_ids": [1], "answer_ids": [1, 2.5]}': "answer_ids is no list of ids, or empty",
    '{"messages": []}': "messages is no list or empty",
    '{"messages": [{"role": "user", "content": "a"}]}': "messages without an assistant turn",
    '{"messages": [{"role": "robot", "content": "a"}]}': "a turn of unknown role 'robot'",
    '{"messages": [{"role": "user", "content": null}]}': "a message without text content",
}


def test_malformed_rows_are_counted(chatml, tmp_path):
    config = make_config(tmp_path, [*BAD, prepared(5, 5)])
    with config.answers_file.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n{"prompt_ids": [1, 2], "ans')
    check_data(config)
    documents = load_documents(config, chatml)
    assert [d.row for d in documents.train] == [len(BAD) + 1]
    counted = dict.fromkeys(BAD.values(), 1)
    counted["answer_ids is no list of ids, or empty"] = 2
    assert documents.skipped == counted | {"not JSON": 2, "not Unicode text": 2}


def test_no_data(tmp_path, chatml):
    with pytest.raises(InputError, match="no prompt, messages or conversations"):
        check_data(make_config(tmp_path, list(BAD)))
    with pytest.raises(InputError, match="is empty"):
        check_data(make_config(tmp_path, []))
    config = make_config(tmp_path, [])
    config.answers_file.unlink()
    with pytest.raises(InputError, match=r"does not exist\nRun scripts/prepare_data.py"):
        check_data(config)


def test_held_out_prompts(chatml, tmp_path):
    """All rows of a prompt go to one side, whatever their order; greedy rows evaluate."""
    rows = [prepared(5, 5, f"p{i}", t) for i in range(40) for t in (0, 0.7, 1.0)]
    documents = load_documents(make_config(tmp_path, rows, eval_prompts=10), chatml)
    held = {d.prompt_key for d in documents.eval}
    assert len(held) == len(documents.eval) == 10 and len(documents.train) == 90
    assert {d.temperature for d in documents.eval} == {0}
    assert not held & {d.prompt_key for d in documents.train}
    again = load_documents(make_config(tmp_path, rows[::-1], eval_prompts=10), chatml)
    assert {d.prompt_key for d in again.eval} == held
    warm = [row for row in rows if row["temperature"] > 0]
    assert len(load_documents(make_config(tmp_path, warm, eval_prompts=10), chatml).eval) == 20
    with pytest.warns(UserWarning, match="2 of 8 prompts"):
        few = load_documents(make_config(tmp_path, rows[:24], eval_prompts=10), chatml)
    assert len(few.eval) == 2


def test_training_on_some_temperatures_leaves_the_held_out_rows(chatml, tmp_path):
    rows = [prepared(5, 5, f"p{i}", t) for i in range(40) for t in (0, 0.7, 1.0)]
    whole = load_documents(make_config(tmp_path, rows, eval_prompts=10), chatml)
    for chosen in ([0], [1.0, 0.7]):
        config = make_config(tmp_path, rows, eval_prompts=10, temperatures=chosen)
        some = load_documents(config, chatml)
        assert some.train == [d for d in whole.train if d.temperature in chosen]
        assert (some.eval, some.drawn) == (whole.eval, whole.drawn)
        # All rows are in the feature cache, which runs then share.
        key = attrgetter("row")
        every = sorted(some.train + some.unused + some.held_out, key=key)
        assert every == sorted(whole.train + whole.held_out, key=key)
    config = make_config(tmp_path, rows, eval_prompts=10, temperatures=[0, 0.5])
    with pytest.raises(InputError, match=r"temperature 0.5\nIts temperatures are: 0.0, 0.7, 1.0"):
        load_documents(config, chatml)


def test_answers_of_a_cut_law_are_those_of_no_temperature(chatml, tmp_path):
    rows = [prepared(5, 5, f"p{i}", t) for i in range(20) for t in (0, 1.0)]
    cut = [row | {"top_p": 0.9} for row in rows]
    found = [load_documents(make_config(tmp_path, r, eval_prompts=5), chatml) for r in (rows, cut)]
    assert [(len(d.eval), len(d.drawn)) for d in found] == [(5, 5), (5, 0)]


def test_collate_and_counts(chatml, tmp_path):
    rows = [prepared(2, 3), prepared(1, 2)]
    documents = load_documents(make_config(tmp_path, rows), chatml).train
    batch = collate(documents, pad_id=7)
    assert batch["ids"].tolist() == [[10, 11, 50, 51, 52], [10, 50, 51, 7, 7]]
    assert batch["length"].tolist() == [5, 3]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    counts = token_counts(documents, 384)
    assert counts.shape == (384,) and counts[50:53].tolist() == [2, 2, 1] and counts.sum() == 5


def test_order():
    assert sorted(order(1, 2, 100)) == list(range(100))
    assert np.array_equal(order(1, 2, 100), order(1, 2, 100))
    assert not np.array_equal(order(1, 2, 100), order(1, 3, 100))
    assert not np.array_equal(order(1, 2, 100), order(2, 2, 100))
    # The stream is part of a checkpoint's meaning: these numbers must never change.
    assert order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    first = np.array([order(seed, 0, 5)[0] for seed in range(2000)])
    assert np.abs(np.bincount(first, minlength=5) - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


def test_exit_code(capsys):
    def bad() -> int:
        raise InputError("this was met", "do that")

    def stopped() -> int:
        raise KeyboardInterrupt

    assert exit_code(lambda: 0) == 0
    assert exit_code(bad) == 2
    assert capsys.readouterr().err == "this was met\ndo that\n"
    assert exit_code(stopped) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_two_lines(capsys):
    """Of Python's own writes, and of a library's that gives the number as text."""

    def full() -> int:
        with open("/dev/full", "w") as file:
            file.write("a" * 10**6)
        return 0

    def told() -> int:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    for write in (full, told):
        assert exit_code(write) == 2
        met, advice = capsys.readouterr().err.splitlines()
        assert met.startswith("the disk is full: ") and advice.startswith("Free some space")
