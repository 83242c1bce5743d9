"""One writer at a time: runs, prepared answers, feature caches."""

import errno
import fcntl
import json
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from launch import environment, write_config
from training import documents, make_config, make_target, metrics, train

from selfdraft.heads.errors import InputError
from selfdraft.scripts.prepare_data import prepare
from selfdraft.train.config import PACKAGE
from selfdraft.train.distill import FeatureCache
from selfdraft.train.locks import locked
from selfdraft.train.sections import FeaturesConfig

HOLD = """
import sys, time
from pathlib import Path
from selfdraft.train.locks import locked
with locked(Path(sys.argv[1]), "-"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_lets_go(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipe) as holder:
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(
            InputError, match=r"in use by another process\nWait .* or: Elsewhere"
        )
        with refused, locked(tmp_path, "Elsewhere."):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path, "Elsewhere."), locked(tmp_path / "answers.jsonl", "-", file=True):
        pass


def test_two_trainings_at_once_in_one_folder(tmp_path):
    """One trains as if alone, the other writes nothing and says why."""
    schedule = {"steps": 30, "save_every": 5, "eval_every": 30}
    path = write_config(
        tmp_path / "run.yaml", make_config(tmp_path, schedule=schedule, resume="latest")
    )
    command = [sys.executable, str(PACKAGE / "train.py"), str(path)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen(command, env=environment(), **pipes))
            for _ in range(2)
        ]
        said = [process.communicate(timeout=200)[1] for process in both]
    codes = [process.returncode for process in both]
    steps = [line["step"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 31))
    if codes != [0, 0]:  # else the second came after the end of the first
        assert sorted(codes) == [0, 2] and "in use by another process" in said[codes.index(2)]


def test_a_run_leaves_alone_what_another_trains_or_prepares(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    answers = tmp_path / "shared.jsonl"
    data = {"prompts": str(prompts), "file": str(answers), "max_new_tokens": 4, "eval_prompts": 2}
    config = make_config(tmp_path, data=data)
    with locked(tmp_path / "run", "-"):
        for command in (train, prepare):
            with pytest.raises(InputError, match=r"run is in use .*\n.*another output_dir"):
                command(config)
    refused = pytest.raises(InputError, match=r"shared.jsonl is in use .*\n.*Set data.file")
    with locked(answers, "-", file=True), refused:
        prepare(config)
    assert prepare(config) == 0
    seeds = Counter(json.loads(line)["seed"] for line in answers.open())
    assert len(seeds) == 8 and set(seeds.values()) == {1}


def test_data_is_prepared_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match=r"2 processes are to prepare .*\nRun it in one"):
        prepare(make_config(tmp_path))


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"run is no folder that can be written to"):
        train(make_config(tmp_path))
    for way in ("checkpoints", "metrics.jsonl"):
        folder = tmp_path / way.split(".")[0]
        config = make_config(tmp_path, output_dir=str(folder))
        folder.mkdir()
        (folder / way).write_text("") if way == "checkpoints" else (folder / way).mkdir()
        path = write_config(tmp_path / "run.yaml", config)
        done = subprocess.run(
            [sys.executable, str(PACKAGE / "train.py"), str(path)],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and f"{folder / way}: " in done.stderr
        assert "Traceback" not in done.stderr


# -- feature caches ------------------------------------------------------------------------------


def open_cache(folder, target, rows, taps=(1,)) -> FeatureCache:
    cache = FeatureCache(folder, target, rows, list(taps), FeaturesConfig(dtype="float32"))
    cache.prepare()
    return cache


def test_unlike_caches_share_a_folder_and_never_touch_one_another(tmp_path):
    """Another one is made in the middle of a read; each row has its own features to the end."""
    target = make_target()
    mine, others = documents([10 + i % 30 for i in range(80)]), documents([12] * 80, answer=4)
    cache = open_cache(tmp_path, target, mine)
    wanted = [row["hidden"].clone() for row in map(cache._read, mine)]
    first = cache.get(mine[:2])["hidden"].clone()
    for rows, taps in ((others, [1]), (mine, [1, 2]), (mine, [])):
        other = open_cache(tmp_path, target, rows, taps)
        assert (other.folder == cache.folder) == (taps == [])  # fewer taps are served
    again = open_cache(tmp_path, target, mine)
    assert again.folder == cache.folder and cache.get(mine[:2])["hidden"].equal(first)
    for row, states in zip(mine, wanted, strict=True):
        assert cache._read(row)["hidden"].equal(states) and again._read(row)["hidden"].equal(states)
    assert len(list(tmp_path.glob("cache-*"))) == 3


def test_a_cache_of_the_first_releases_is_read_and_never_wiped(tmp_path, monkeypatch):
    target, rows = make_target(), documents([9, 17, 12])
    made = open_cache(tmp_path / "new", target, rows)
    made.folder.rename(tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").glob("*.*")}
    assert open_cache(tmp_path / "old", target, rows[:2]).folder.parent == tmp_path / "old"
    with monkeypatch.context() as patch:
        patch.setattr(FeatureCache, "_compute_chunk", lambda *_: pytest.fail("computed"))
        assert open_cache(tmp_path / "old", target, rows).folder == tmp_path / "old"
    assert {path: path.read_bytes() for path in before} == before


def test_one_process_fills_a_cache_and_any_number_read_it(tmp_path, capsys):
    target, rows = make_target(), documents([9, 17, 12])
    folder = open_cache(tmp_path, target, rows).folder
    index = folder / "index.json"
    with ThreadPoolExecutor(1) as other:
        with locked(index, "-", file=True):
            assert open_cache(tmp_path, target, rows).folder == folder
            next(folder.glob("chunk-*")).unlink()
            waiting = other.submit(open_cache, tmp_path, target, rows)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.5)
        assert waiting.result(timeout=60).folder == folder
    assert "another process fills" in capsys.readouterr().out


def test_a_cache_that_is_repaired_stays_the_one_that_is_chosen(tmp_path, monkeypatch):
    """By every process: one that has all taps serves those that want fewer meanwhile."""
    target, rows = make_target(), documents([9, 17, 12])
    wide = open_cache(tmp_path, target, rows, [1, 2])
    next(wide.folder.glob("chunk-*")).unlink()
    chosen, right = [], FeatureCache._compute_chunk

    def compute(cache: FeatureCache, number: int) -> Any:
        config = FeaturesConfig(dtype="float32")
        chosen.append(FeatureCache(tmp_path, target, rows, [1], config).folder)
        return right(cache, number)

    monkeypatch.setattr(FeatureCache, "_compute_chunk", compute)
    assert open_cache(tmp_path, target, rows, [1]).folder == wide.folder
    assert chosen == [wide.folder]


def test_a_disk_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="takes no locks"), locked(tmp_path, "-"):
        pass
