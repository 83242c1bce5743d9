"""Rows from files: JSON lines, arrays cut anywhere, Parquet, columns of mixed types, the hub."""

import json
import random
from collections import Counter

import pyarrow as pa
import pytest
from chats import CHAT, make_config
from pyarrow import parquet

from selfdraft.heads.errors import InputError
from selfdraft.train import reading
from selfdraft.train.data import check_data, load_documents
from selfdraft.train.hub import fetch, shard
from selfdraft.train.reading import CUT_OFF, check_end, read_rows

ROWS = [
    {"conversations": [{"from": "human", "value": 'a "quoted" [text] {with} \\ marks,'}]},
    {"id": 1, "n": [[], {}, [1, {"x": "}]"}]], "text": "ünï🙂"},
    {"text": "x" * 300},
    {"empty": "", "last": None},
]


def read(path, **options):
    skipped = Counter()
    return list(read_rows(path, skipped, **options)), skipped


@pytest.fixture(params=[7, 64, 2**20])
def block(request, monkeypatch):
    """Bytes read at once: marks and strings lie across their borders."""
    monkeypatch.setattr(reading, "BLOCK", request.param)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", ["", "\ufeff", " \n"])
def test_an_array_is_its_elements(tmp_path, block, indent, before):
    path = tmp_path / "a.json"
    path.write_text(before + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n")
    assert read(path) == (list(enumerate(ROWS, start=1)), Counter())
    check_end(path, False)


def test_lines_are_rows_whatever_the_name(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read(path)[0] == list(enumerate(ROWS, start=1))


def test_an_array_cut_at_any_byte_gives_its_whole_rows(tmp_path, block):
    whole = json.dumps(ROWS, indent=1).encode()
    ends = [
        len(json.dumps(ROWS[: n + 1], indent=1).encode()) - 2 for n in range(len(ROWS))
    ]  # of each row, behind its brace
    path = tmp_path / "cut.json"
    for size in [*range(1, len(whole), 13), len(whole) - 1]:
        path.write_bytes(whole[:size])
        count = sum(end <= size for end in ends)
        rest = whole[max([1, *ends[:count]]) : size].strip(b" \n,")
        with pytest.raises(InputError) as caught:
            read(path)
        met, advice = str(caught.value).splitlines()
        assert f"ends at byte {size}," in met
        assert f"its {count} whole rows" in advice and "data.on_truncated=keep_whole" in advice
        with pytest.raises(InputError, match="is cut off"):
            check_end(path, False)
        rows, skipped = read(path, keep_whole=True)
        assert [row for _, row in rows] == ROWS[:count] and skipped == (
            {CUT_OFF: 1} if rest else {}
        )


def test_where_an_array_is_cut_is_said(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text('[{"a": "b"}, {"a": "c')
    with pytest.raises(InputError, match=r"byte 21, in the middle of a string; row 2, .* byte 13"):
        read(path)
    path.write_text('[{"a": "b"}, {"a": "c"')
    with pytest.raises(InputError, match=r"byte 22, before its array does"):
        read(path)


def test_a_damaged_element_costs_itself_alone(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {"a": nope}, 7, {"a": "\\ud800"}, , {"a": 2},]')
    rows, skipped = read(path)
    assert rows == [(1, {"a": 1}), (6, {"a": 2})]
    counted = ("not JSON", "not a JSON object", "not Unicode text", "an empty line")
    assert skipped == dict.fromkeys(counted, 1)
    path.write_text('[{"a": 1}] {"a": 2}')
    with pytest.raises(InputError, match="ends at byte 10, and more follows"):
        read(path)


def test_mutated_files_give_rows_or_a_clear_error(tmp_path):
    dice, path = random.Random(0), tmp_path / "m.json"
    for n in range(300):
        data = bytearray(json.dumps(ROWS, indent=n % 2 or None).encode())
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data))
            data[place : place + dice.randint(0, 3)] = dice.choices(b'"\\[]{},:ax\x00\xff', k=2)
        path.write_bytes(data)
        try:
            assert all(isinstance(row, dict) for _, row in read(path)[0])
        except InputError as error:
            assert len(str(error).splitlines()) == 2


def test_parquet(tmp_path, chatml):
    path = tmp_path / "a.parquet"
    rows = [{"messages": CHAT[:2], "note": None}, {"messages": CHAT, "note": 3}] * 200
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert [row for _, row in read(path)[0]] == [
        {k: v for k, v in row.items() if v is not None} for row in rows
    ]
    documents = load_documents(make_config(tmp_path, [], file=str(path)), chatml)
    assert [d.row for d in documents.train] == list(range(1, 401)) and not documents.skipped
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="is no whole Parquet file"):
        read(path)


def test_d9_columns_of_mixed_types(tmp_path):
    """D9: null for 10 MB and a string then; arguments of any type; keys of single rows."""
    path = tmp_path / "mixed.jsonl"
    filler = [{"from": "human", "value": "w " * 60}, {"from": "gpt", "value": "v " * 60}]
    rows = [{"conversations": filler, "system": None, f"extra{i % 7}": i} for i in range(35000)]
    rows += [{"conversations": filler, "system": "Be brief.", "extra1": "text"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 10e6
    found, skipped = read(path)
    assert [number for number, _ in found] == list(range(1, 35002)) and not skipped
    assert found[-1][1]["system"] == "Be brief." and found[0][1]["system"] is None


def test_a_limit_counts_rows(tmp_path, chatml):
    rows = [{"messages": CHAT}, "nothing", {"messages": CHAT}, {"messages": CHAT}]
    documents = load_documents(make_config(tmp_path, rows, limit=3), chatml)
    assert len(documents.train) == 3 and documents.skipped == {"not JSON": 1}


def test_the_reason_comes_before_the_target_loads(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(json.dumps([{"messages": CHAT}] * 3)[:-30])
    config = make_config(tmp_path, [], file=str(path))
    with pytest.raises(InputError, match=r"row 3.*\n.*use its 2 whole rows"):
        check_data(config)
    check_data(make_config(tmp_path, [], file=str(path), on_truncated="keep_whole"))


def test_a_dataset_is_streamed_once_and_taken_up_after_a_kill(tmp_path):
    """A folder stands for a dataset of the hub: both are read by `datasets.load_dataset`."""
    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps({"messages": CHAT[:2], "n": n}) + "\n" for n in range(20)]
    (source / "train.jsonl").write_text("".join(lines))
    name = f"hub:{source}"
    whole, killed = shard(name, tmp_path / "a", None), shard(name, tmp_path / "b", None)
    assert fetch(name, whole, None) == 20 and fetch(name, whole, None) == 0
    killed.parent.mkdir(parents=True)
    part = killed.with_name(f"{killed.name}.part")
    part.write_bytes(b"".join(whole.read_bytes().splitlines(True)[:7]) + b'{"messages": [')
    assert fetch(name, killed, None) == 13
    assert killed.read_bytes() == whole.read_bytes() and not part.exists()
    assert [row["n"] for _, row in read(whole)[0]] == list(range(20))
    few = shard(name, tmp_path / "a", 5)
    assert few != whole and fetch(name, few, 5) == 5
    config = make_config(tmp_path, [], file=name)
    assert config.answers_file == shard(name, tmp_path / "run", None)
    with pytest.raises(InputError, match=r"prepare_data.py"):
        check_data(config)
    with pytest.raises(InputError, match=r"cannot be read"):
        fetch(f"hub:{source}@nosuchsplit", tmp_path / "x.jsonl", None)
    with pytest.raises(InputError, match=r"names no dataset"):
        fetch("hub:", tmp_path / "y.jsonl", None)


def test_a_row_of_the_hub_has_its_own_keys_alone(tmp_path):
    """D9: Arrow gives a tool call the arguments of all others, as null."""
    source = tmp_path / "source"
    source.mkdir()
    calls = [{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "add", "arguments": {}}]
    calls[1]["arguments"] = {"a": 1, "b": 2}
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{"function": c}]}]} for c in calls]
    rows += [{"conversations": [{"from": "human", "value": "a"}], "system": "Be brief."}]
    (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "shard.jsonl"
    assert fetch(f"hub:{source}", path, None) == 3
    assert [row for _, row in read(path)[0]] == rows
