"""Templates that ask for the date, fail or are none; Parquet with values that Python has not got;
rows held out that are not greedy."""

import json
from collections import Counter
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CHATML
from rich.console import Console
from training import make_config, make_target

from selfdraft.heads.errors import InputError
from selfdraft.scripts.show_mask import show
from selfdraft.train.chat import DAY, chat_ids
from selfdraft.train.data import load_documents
from selfdraft.train.formats import Conversation
from selfdraft.train.reading import read_rows
from selfdraft.train.setup import describe

CHAT = Conversation([{"role": "user", "content": "hi"}], [])


@pytest.fixture
def target():
    """One whose tokenizer is its own."""
    return make_target()


@pytest.mark.parametrize("form", ["%d %b %Y", "%-d %B %Y", "%Y-%m-%d", "%A, %H:%M", "100%"])
@pytest.mark.parametrize(
    "prefix",
    [
        "{{ strftime_now('FORM') }}|",
        "\n{%- if strftime_now is defined %}{%- set d = strftime_now('FORM') %}{% endif %}{{ d }}|",
        "\n{{ strftime_now('FORM') }}|",
    ],
)
def test_training_rows_do_not_depend_on_the_day(target, form, prefix):
    """What a template gives for today is the same on every day, and else nothing is changed."""
    target.tokenizer.chat_template = prefix.replace("FORM", form) + CHATML
    ours, today = chat_ids(CHAT, target, prompt=True), target.chat_ids(CHAT.messages)
    ours, today = (target.tokenizer.decode(ids) for ids in (ours, today))
    date, rest = ours.split("|", 1)
    assert date.lstrip("\n") == DAY.strftime(form)
    assert rest == today.split("|", 1)[1]
    assert date.startswith("\n") == today.startswith("\n")
    if "%Y" in form:
        assert today.lstrip("\n").split("|", 1)[0] == datetime.now().strftime(form)


def test_a_template_without_dates_is_left_as_it_is(target):
    target.tokenizer.chat_template = CHATML
    assert chat_ids(CHAT, target, prompt=True) == target.chat_ids(CHAT.messages)


def test_what_a_template_says_is_told(tmp_path, target):
    """Its own words for rows that it refuses; a template that is none is no matter of rows."""
    config = make_config(tmp_path)
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        InputError, match=r"20 × the chat template refuses .*: roles must alternate"
    ):
        load_documents(config, target)
    target.tokenizer.chat_template = "{% for m in messages %}\n{{ m.content }"
    with pytest.raises(InputError, match=r"the chat template is no template: line 2: .*\nRepair"):
        load_documents(config, target)


def damaged(count: int) -> pa.Array:
    """Texts, of which the second is no Unicode."""
    whole = pa.array(["aaaa"] * count)
    _, offsets, data = whole.buffers()
    raw = bytearray(data.to_pybytes())
    raw[5] = 0xFF
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(bytes(raw))])


@pytest.mark.parametrize(
    ("column", "usable"),
    [
        (pa.array([10**12] * 4, pa.timestamp("s")), 4),
        (pa.array([10**9] * 4, pa.timestamp("us", tz="Mars/Base")), 4),
        (pa.array([10**7] * 4, pa.date32()), 4),
        (pa.array([2**62] * 4, pa.duration("s")), 4),
        (pa.array([[10**12]] * 4, pa.list_(pa.timestamp("s"))), 0),
        (pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())), 4),
        (damaged(4), 3),
    ],
)
def test_columns_that_python_has_no_values_for(tmp_path, column, usable):
    path, skipped = tmp_path / "rows.parquet", Counter()
    pq.write_table(pa.table({"text": ["hello there"] * 4, "odd": column}), path)
    rows = list(read_rows(path, skipped))
    assert len(rows) == usable and sum(skipped.values()) == 4 - usable
    assert all(row["text"] == "hello there" for _, row in rows)
    if usable == 3:
        assert skipped == {"not Unicode text": 1} and [number for number, _ in rows] == [1, 3, 4]


def test_rows_held_out_are_counted_and_shown_whatever_their_temperature(tmp_path):
    lines = [
        {
            "prompt": f"q {i}",
            "prompt_ids": [65, 66, 67 + i],
            "answer_ids": [75, 76, 77, 78],
            "temperature": t,
        }
        for i in range(20)
        for t in (0.0, 1.0)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = make_config(tmp_path)
    text = describe(load_documents(config, make_target()))
    assert "32 rows to train on, 8 held out, tau is measured on the 4 greedy ones" in text
    console = Console(record=True, width=100)
    show(config, 40, console)
    shown = console.export_text()
    assert all(f"row {number}: 4 of 7" in shown for number in range(1, 41))
