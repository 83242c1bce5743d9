import json

import pytest
import torch
from training import make_config, make_target

from selfdraft.inference.speculator import Speculator
from selfdraft.scripts.prepare_data import prepare
from selfdraft.train.answers import Request, answer_all
from selfdraft.train.data import load_documents
from selfdraft.train.distill import FeatureCache, open_features
from selfdraft.train.features import compute
from selfdraft.train.formats import Conversation
from selfdraft.train.packing import Document
from selfdraft.train.recording import RecordedStates, Recorder
from selfdraft.train.sections import Answer

PROMPTS = [[5, 6, 7], [9] * 12, [300, 4], [8, 1, 2, 3, 4]]


@pytest.fixture(scope="module")
def target():
    return make_target()


def record(target, taps, do_sample=False):
    """Documents of answered prompts, and what was recorded while they were answered."""
    recorder = Recorder(taps, "float32")
    out = Speculator(target).generate(
        PROMPTS, max_new_tokens=9, do_sample=do_sample, seed=3, record=recorder
    )
    rows = [prompt + new for prompt, new in zip(PROMPTS, out.token_ids, strict=True)]
    states = [recorder.states(row, len(ids)) for row, ids in enumerate(rows)]
    documents = [
        Document(ids, [i >= len(p) for i in range(len(ids))], 0.0, row, str(row))
        for row, (ids, p) in enumerate(zip(rows, PROMPTS, strict=True), start=1)
    ]
    return documents, states


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("taps", [[], [0, 2]])
def test_recorded_states_are_those_of_a_second_pass(target, taps, do_sample):
    documents, states = record(target, taps, do_sample)
    for document, recorded in zip(documents, states, strict=True):
        fresh = compute(target, [document], taps, "float32")[0]
        assert recorded.keys() == fresh.keys()
        for name, value in fresh.items():
            torch.testing.assert_close(recorded[name][:-1], value[:-1], atol=1e-5, rtol=1e-5)
            assert not recorded[name][-1].any()  # the target never read the last token


def test_the_cache_takes_what_was_recorded(target, tmp_path, monkeypatch):
    features = {"dtype": "float32"}
    config = make_config(tmp_path, head={"taps": [1]}, data={"features": features})
    documents, states = record(target, [1])
    recorded = RecordedStates(config, target)
    kept = [(d.ids, s) for d, s in zip(documents, states, strict=True)]
    recorded.write(kept[:3])
    asked = []
    whole = target.features
    monkeypatch.setattr(target, "features", lambda *a: asked.append(len(a[0])) or whole(*a))
    cache = FeatureCache(
        config.features_folder, target, documents, [1], config.data.features, recorded
    )
    cache.prepare()
    assert asked == [1]  # only the row that was not recorded
    found = cache.get(documents)["hidden"]
    for row, state in enumerate(states[:3]):
        assert torch.equal(found[row, : len(state["hidden"])], state["hidden"])
    assert not list(recorded.folder.iterdir())


def test_states_are_recorded_for_all_runs_on_the_data(target, tmp_path, monkeypatch):
    """A comparison of heads that read unlike layers fills one cache from what was recorded."""
    rows = [{"prompt": f"word {i}"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompts": str(tmp_path / "prompts.jsonl"), "file": str(tmp_path / "a.jsonl")}
    data |= {"max_new_tokens": 6, "answers": [{"temperature": 0}]}
    runs = [make_config(tmp_path, head={"taps": taps}, data=data) for taps in ([2], [0, 1])]
    prepare(runs[0], runs[1:])
    recorded = RecordedStates(runs[0], target, [0, 1, 2])
    documents = load_documents(runs[0], target)
    assert documents.train and all(recorded.get(d.ids) for d in documents.train)
    assert recorded.bytes == sum(p.stat().st_size for p in recorded.folder.iterdir()) > 0
    monkeypatch.setattr(target, "features", lambda *_: pytest.fail("a second pass"))
    open_features(runs[0], target, documents, [0, 1, 2])


def test_the_size_cap_holds_over_restarts(target, tmp_path, monkeypatch):
    """What lies there already counts."""
    documents, states = record(target, [])
    config = make_config(tmp_path, data={"features": {"max_gb": 1e-9}})
    RecordedStates(config, target).write([(documents[0].ids, states[0])])
    request = Request(0, Conversation([{"role": "user", "content": "a"}], []), [5], Answer(), 0)
    config.answers_file.parent.mkdir(parents=True, exist_ok=True)
    asked = []
    generate = lambda prompts, answer, seeds, record: asked.append(record) or [[5, 5]]  # noqa: E731
    answer_all(config, target, [request], set(), generate)
    assert asked == [None]


def test_states_of_another_target_are_not_seen(target, tmp_path):
    config = make_config(tmp_path)
    documents, states = record(target, [])
    RecordedStates(config, target).write([(documents[0].ids, states[0])])
    assert RecordedStates(config, target).get(documents[0].ids) is not None
    other = make_target(hidden_act="gelu", rms_norm_eps=1e-3)
    other.spec.identity["fingerprint"] = "another"
    assert RecordedStates(config, other).get(documents[0].ids) is None


def test_a_damaged_file_is_passed_over(target, tmp_path):
    config = make_config(tmp_path)
    documents, states = record(target, [])
    recorded = RecordedStates(config, target)
    recorded.write([(documents[0].ids, states[0])])
    (path,) = recorded.folder.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert recorded.get(documents[0].ids) is None
