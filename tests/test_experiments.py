"""Trainings that are compared: one command that makes, trains and times, and goes on where it was
killed."""

import argparse
import json
import time
from pathlib import Path

import pytest
import training
from comparisons import PROMPTS, place
from launch import finish, start
from training import make_config, write_data

from selfdraft.heads.errors import InputError
from selfdraft.scripts import bench_train, compare_heads, experiments, runs, sweep
from selfdraft.train.config import PACKAGE, load_config
from selfdraft.train.data import load_documents

SCRIPT = PACKAGE / "scripts" / "compare_heads.py"


# -- the whole command ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, list[str]]:
    """A comparison of two kinds that was killed once while it timed, and run to its end."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = [*place(folder), "--kinds", "medusa,hydra", "--minutes", "0.005"]
    killed = start(1, SCRIPT, *arguments)
    try:
        give_up = time.monotonic() + 120
        while not list((folder / "all").glob("bench-*.jsonl")):
            assert killed.poll() is None and time.monotonic() < give_up, killed.communicate()
            time.sleep(0.02)
    finally:
        killed.kill()
        killed.communicate()
    (ledger,) = (folder / "all").glob("bench-*.jsonl")
    with ledger.open("a") as file:
        file.write('{"torn')
    (folder / "before.jsonl").write_text(ledger.read_text())
    trained = {p: p.stat().st_mtime_ns for p in (folder / "all").rglob("model.safetensors")}
    finish(start(1, SCRIPT, *arguments))
    assert trained == {p: p.stat().st_mtime_ns for p in trained}
    return folder, arguments


def test_a_killed_comparison_goes_on_where_it_stopped(compared):
    folder, arguments = compared
    before = (folder / "before.jsonl").read_text().splitlines()[:-1]
    (ledger,) = (folder / "all").glob("bench-*.jsonl")
    lines = ledger.read_text().splitlines()
    assert len(before) >= 1 and lines[: len(before)] == before and len(lines) == 3
    first = json.loads((folder / "results" / "heads.json").read_text())
    assert compare_heads.main(arguments) == 0  # all is there: the same figures once more
    again = json.loads((folder / "results" / "heads.json").read_text())
    assert (again["rows"], again["heads"]) == (first["rows"], first["heads"])


def test_the_report_holds_every_head_and_every_way(compared):
    folder, _ = compared
    report = json.loads((folder / "results" / "heads.json").read_text())
    names = [entry["name"] for entry in report["rows"]]
    assert names == "plain hf ngram medusa medusa+ngram hydra hydra+ngram".split()
    for entry in report["rows"]:
        assert list(entry["by_category"]) == ["why", "how"] and entry["identical"] == "3/3"
        parts = entry["by_category"].values()
        assert sum(part["tokens"] for part in parts) == entry["tokens"] > 0
        assert 0 < entry["seconds_by_part"]["prefill"] < entry["seconds"]
        for name in ("plain", "hf"):
            assert entry[f"speedup_vs_{name}"] > 0 and entry[f"decode_speedup_vs_{name}"] > 0
    for head in report["heads"]:
        assert head["minutes"] >= 0.005 and head["tokens_per_second"] > 0
        assert head["tau"] == pytest.approx(1 + sum(head["tau_by_depth"]))
        assert head["tau_t1"] == pytest.approx(1 + sum(head["tau_t1_by_depth"]))
        assert head["parameters"] > 1000
    page = (folder / "results" / "heads.md").read_text()
    assert f"| {report['heads'][0]['parameters']:,} |" in page and "medusa+ngram" in page
    for plot in ("heads_speed.svg", "heads_tau.svg"):
        assert f"({plot})" in page and "<svg" in (folder / "results" / plot).read_text()


def test_sampled_drafts_are_accepted_as_often_as_their_laws_say(compared):
    folder, arguments = compared
    target = folder / "results" / "t1.json"
    assert compare_heads.main([*arguments, "--temperature", "1", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert "temperature 1" in report["conditions"]["sampling"]
    assert {entry["identical"] for entry in report["rows"]} == {None}
    for entry in report["acceptance"]:
        assert entry["judged"][0] > 5 and 0 < entry["one_minus_tv"][0] <= 1
    assert "1 - TV" in target.with_suffix(".md").read_text()


def test_the_best_head_is_trained_for_longer(compared):
    folder, arguments = compared
    target = folder / "results" / "best.json"
    more = ["--best-minutes", "0.05", "--json", str(target)]
    assert compare_heads.main([*arguments, *more]) == 0
    report = json.loads(target.read_text())
    *kinds, longer = report["heads"]
    best = max(kinds, key=lambda head: head["tau"])
    assert [head["name"] for head in kinds] == ["medusa", "hydra"]
    assert (longer["name"], longer["kind"]) == (f"{best['name']}-0.05min", best["kind"])
    assert longer["minutes"] >= 0.05 > best["minutes"] and longer["steps"] > best["steps"]
    rows = {row["name"]: row for row in report["rows"]}
    assert (
        rows[longer["name"]]["identical"] == rows[f"{longer['name']}+ngram"]["identical"] == "3/3"
    )
    assert (
        f"| {longer['name']}+ngram | {longer['parameters']:,} |"
        in target.with_suffix(".md").read_text()
    )


def test_one_command_at_a_time_works_in_a_folder(compared, capsys):
    folder, arguments = compared
    with runs.workplace(folder / "all"):
        assert compare_heads.main(arguments) == 2
    assert "is in use by another process" in capsys.readouterr().err


# -- variants ------------------------------------------------------------------------------------


def variants(
    folder: Path, named: dict, *more: str, jobs: int = 1
) -> dict[str, experiments.Variant]:
    options = argparse.Namespace(
        config=str(folder / "run.yaml"), overrides=[], output=str(folder / "all"), jobs=jobs
    )
    return {v.name: v for v in experiments.overridden(options, named, list(more))}


def test_variants_share_answers_and_features(tmp_path):
    place(tmp_path, data={"file": None, "prompts": "prompts.jsonl"})
    named = {"a": {}, "b": {"head.loss": {"kl": 1, "tv": 0.5}, "data.bucket": 4}}
    named |= {"c": {"data.features.dtype": "int8"}}
    found = {name: v.config for name, v in variants(tmp_path, named).items()}
    assert found["b"].head.loss == {"kl": 1, "tv": 0.5}
    for config in found.values():
        assert config.answers_file == tmp_path / "run/answers.jsonl"
        assert config.features_folder == tmp_path / "run/features"


def test_prompts_of_the_hub_are_fetched_once_for_all_variants(tmp_path):
    """A folder stands for a dataset of the hub."""
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"prompt": prompt}) + "\n" for _, prompt in PROMPTS]
    (tmp_path / "set" / "train.jsonl").write_text("".join(rows))
    place(tmp_path, data={"file": None, "prompts": f"hub:{tmp_path / 'set'}"})
    found = variants(tmp_path, {"a": {}, "b": {"head.depth": 2}}).values()
    assert len({v.config.data.prompts for v in found}) == 1
    (file,) = (tmp_path / "run" / "hub").glob("*.jsonl")
    assert str(file) == next(iter(found)).config.data.prompts
    assert len(file.read_text().splitlines()) == len(PROMPTS)


def test_what_a_training_depends_on_is_in_the_name_of_its_folder(tmp_path):
    place(tmp_path)
    one = variants(tmp_path, {"x": {}})["x"]
    assert one.folder == variants(tmp_path, {"x": {"tracking.name": "y"}})["x"].folder
    others = [variants(tmp_path, {"x": {"optim.lr": 0.1}})["x"], variants(tmp_path, {"y": {}})["y"]]
    others += [
        variants(tmp_path, {"x": {}}, "schedule.minutes=1", jobs=jobs)["x"] for jobs in (1, 2)
    ]
    assert variants(tmp_path, {"x": {}}, jobs=2)["x"].folder == one.folder
    write_data(tmp_path / "data.jsonl", rows=21)
    others += [variants(tmp_path, {"x": {}})["x"]]
    assert len({one.folder, *(other.folder for other in others)}) == 6
    assert load_config(PACKAGE / "configs" / "hydra.yaml") and not one.trained


def test_seeds_of_a_named_target_share_its_data(tmp_path):
    """And those of a random one, which is another target with each seed, do not."""
    for target, shared in ({"model": "somewhere"}, True), ({"random": training.LLAMA}, False):
        place(tmp_path, target={"random": None, **target})
        by_seed = [variants(tmp_path, {"x": {}}, f"seed={s}")["x"] for s in (0, 1)]
        assert (by_seed[0].data.seed == by_seed[1].data.seed) == shared
        assert by_seed[1].config.seed == 1


@pytest.mark.parametrize(
    "text",
    [
        "[a, b]",
        "tv: loss",
        "'a/b': {}",
        "a: {",
        "a: {}\na: {}",
        "base: {}",
        "plain: {}",
        "hf: {}",
        "ngram: {}",
        "long: {schedule.steps: 600}",
        "other: {seed: 3}",
        "half: {data.limit: 5}",
        "wide: {target.dtype: bfloat16}",
        "whole: {schedule: {eval_every: 1}}",
    ],
)
def test_bad_variants_are_two_lines(tmp_path, text):
    path = tmp_path / "v.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        experiments.read_variants(path, ("base", "plain", "hf", "ngram"))
    assert len(str(caught.value).splitlines()) == 2


def test_held_out_rows_are_the_same_cache_for_every_seed(tmp_path):
    """So that the runs of a sweep share it."""
    config, target = make_config(tmp_path), training.make_target()
    rows = [
        {d.row for d in found.train + found.held_out}
        for seed in (0, 1)
        for found in [load_documents(config.model_copy(update={"seed": seed}), target)]
    ]
    assert rows[0] == rows[1] == set(range(1, 21))


@pytest.mark.parametrize("command", [compare_heads, sweep, bench_train])
def test_overrides_may_follow_options(tmp_path, capsys, command):
    """And one of them may ask for nothing to be held out, which leaves nothing to compare."""
    (tmp_path / "v.yaml").write_text("tv: {head.loss: tv}")
    config, common = place(tmp_path)[0], ["--json", str(tmp_path / "x.json")]
    own = {compare_heads: ["--kinds", "hydra"], bench_train: ["--kinds", "hydra", "--steps", "1"]}
    options = own.get(command, ["--variants", str(tmp_path / "v.yaml"), "--steps", "1"])
    assert command.main([config, *common, *options, "optim.lrr=1"]) == 2
    assert "optim.lrr = 1: unknown key" in capsys.readouterr().err
    if command is not bench_train:
        output = ["--output", str(tmp_path / "all")]
        assert command.main([config, *common, *output, *options, "data.eval_prompts=0"]) == 2
        assert "has data.eval_prompts 0" in capsys.readouterr().err
    assert not (tmp_path / "all").exists() and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--kinds", "hydro"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--best-minutes", "-1"],
        ["--best-minutes", "10", "--minutes", "10"],
        ["--limit", "0"],
        ["--temperature", "nan"],
        ["--prompts", "no.jsonl"],
    ],
)
def test_bad_arguments_are_two_lines_and_nothing_is_made(tmp_path, capsys, more):
    assert compare_heads.main([*place(tmp_path), *more]) == 2
    met, _ = capsys.readouterr().err.splitlines()
    assert more[0] in met or more[1] in met
    assert not list(tmp_path.glob("all/*"))


@pytest.mark.parametrize("command", [compare_heads, sweep])
def test_prompts_that_cannot_be_used_are_refused_before_anything_is_trained(
    tmp_path, capsys, command
):
    (tmp_path / "v.yaml").write_text("tv: {head.loss: tv}")
    own = [] if command is compare_heads else ["--variants", str(tmp_path / "v.yaml")]
    arguments = place(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n{"text": 1}\n')
    assert command.main([*arguments, *own, "--minutes", "1"]) == 2
    met, todo = capsys.readouterr().err.splitlines()
    assert "no usable prompt" in met and '{"prompt": "..."}' in todo
    assert not list(tmp_path.glob("all/*"))
