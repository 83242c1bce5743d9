"""Features: what training reads equals what the decoder would see, and the cache can be trusted."""

import json
import threading

import pytest
import torch
from fixtures import make_head
from training import LLAMA, documents, make_target

from selfdraft.heads import HEADS
from selfdraft.heads.errors import InputError
from selfdraft.heads.objectives import known_normalisers
from selfdraft.inference.target import TargetModel
from selfdraft.train import caches, chunks, distill
from selfdraft.train.distill import FeatureCache
from selfdraft.train.features import OnlineFeatures
from selfdraft.train.sections import FeaturesConfig

LENGTHS = [9, 24, 12, 17, 30, 9]
TAPS = [0, 1, 2]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


@pytest.fixture
def open_cache(tmp_path, target, monkeypatch):
    """Opens a cache of small chunks; counts the chunks that are computed."""
    monkeypatch.setattr(distill, "CHUNK_ROWS", 2)
    computed: list[int] = []

    def open_it(rows=None, taps=TAPS, **fields) -> FeatureCache:
        config = FeaturesConfig(**{"dtype": "float32", **fields})
        cache = FeatureCache(tmp_path / "f", target, rows or documents(LENGTHS), taps, config)
        whole, inner = cache._compute_chunk, computed
        inner.clear()
        cache._compute_chunk = lambda n: (inner.append(n), whole(n))[1]
        cache.prepare()
        cache.computed = list(inner)
        return cache

    return open_it


def chunk_bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("chunk-*")}


def test_features_at_a_position_are_those_the_decoder_sees_there(open_cache, target):
    """T7: nothing of the future, post-norm, and right for the teacher."""
    rows = documents(LENGTHS)
    found = open_cache(rows).get(rows)
    for b, row in enumerate(rows):
        last = len(row.ids) - 1
        logits = target.model(torch.tensor([row.ids])).logits[0]
        torch.testing.assert_close(
            target.spec.logits(found["hidden"][b, : last + 1]), logits, atol=1e-5, rtol=1e-5
        )
        for p in (0, 5, last):
            cache = target.new_cache(1, p + 1)
            seen = target.prefill(torch.tensor([row.ids[: p + 1]]), [p + 1], cache, TAPS)
            for name in ("hidden", "taps"):
                torch.testing.assert_close(
                    found[name][b, p], seen[name][0, -1], atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_normalisers_are_those_of_the_states_that_training_reads(open_cache, target, dtype):
    """Where the next token was generated; what is stored of them is not rounded."""
    rows = documents(LENGTHS)
    cache = open_cache(rows, dtype=dtype)
    assert "log_z" not in cache.get(rows)
    cache.prepare_normalisers()
    found = cache.get(rows)
    exact = target.spec.projector(None, False)(found["hidden"]).logsumexp(-1)
    taught = torch.zeros_like(exact, dtype=torch.bool)
    for b, row in enumerate(rows):
        taught[b, : len(row.ids) - 1] = torch.tensor(row.loss_mask[1:])
    assert taught.any() and not taught.all()
    torch.testing.assert_close(found["log_z"], torch.where(taught, exact, 0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pack", [None, 64])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_heads_learn_the_same_with_known_normalisers(tmp_path, target, kind, pack):
    """Where none is stored none is read."""
    head = make_head(
        kind, target.spec, taps=[1], draft_ids=list(range(0, target.spec.vocab_size, 3))
    )
    head.config = head.config.model_copy(update={"loss": {"tv": 1.0, "accepted_length": 1.0}})
    rows = documents(LENGTHS)
    cache = FeatureCache(tmp_path, target, rows, [1], FeaturesConfig(dtype="float32"), pack=pack)
    cache.prepare()
    cache.prepare_normalisers()
    batch, features = cache.collate(rows), cache.get(rows)
    features["log_z"][features["log_z"] == 0] = torch.nan
    known = head(batch, features)
    computed = head(batch, {name: features[name] for name in ("hidden", "taps")})
    torch.testing.assert_close(known, computed, atol=1e-4, rtol=1e-5)
    assert known["accepted"][0] > 0


def test_normalisers_fit_the_logits_or_are_not_used():
    """Autocast rounds logits of float32 states, and so would have rounded their normaliser."""
    features = {"hidden": torch.zeros(1, 3, 8), "log_z": torch.ones(1, 3)}
    assert torch.equal(known_normalisers(features), torch.ones(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert known_normalisers(features) is None
        half = features | {"hidden": features["hidden"].bfloat16()}
        assert torch.equal(known_normalisers(half), torch.ones(3))
    assert known_normalisers(features | {"log_z": torch.ones(1, 3).bfloat16()}) is None
    assert known_normalisers({"hidden": features["hidden"]}) is None


def test_normalisers_of_a_bf16_target_stay_in_float32(tmp_path):
    half, rows = TargetModel.load(random=LLAMA, dtype="bfloat16"), documents(LENGTHS)
    cache = FeatureCache(tmp_path, half, rows, [1], FeaturesConfig(dtype="bfloat16"))
    cache.prepare()
    cache.prepare_normalisers()
    found = cache.get(rows)
    assert (found["hidden"].dtype, found["log_z"].dtype) == (torch.bfloat16, torch.float32)


def test_padding_is_zero_and_rows_come_in_the_order_asked_for(open_cache):
    rows = documents(LENGTHS)
    cache = open_cache(rows)
    found, swapped = cache.get(rows[:2]), cache.get([rows[1], rows[0]])
    assert found["hidden"].shape == (2, 24, 64) and found["taps"].shape == (2, 24, 3, 64)
    assert not found["hidden"][0, 9:].any()
    assert torch.equal(found["hidden"], swapped["hidden"].flip(0))


def test_the_next_batch_is_read_before_it_is_asked_for(open_cache):
    """And any other batch may be asked for in between."""
    rows, began = documents(LENGTHS), threading.Event()
    cache = open_cache(rows)
    wanted = [cache.get(rows[:2]), cache.get(rows[3:])]
    read, batches = cache._stored, []
    cache._stored = lambda batch: (batches.append(batch), began.set(), read(batch))[2]
    cache.expect(rows[:2])
    assert began.wait(10)
    assert torch.equal(cache.get(rows[3:])["taps"], wanted[1]["taps"])
    assert torch.equal(cache.get(rows[:2])["taps"], wanted[0]["taps"])
    assert batches == [rows[:2], rows[3:]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_online_features_pass_through_the_same_rounding(open_cache, target, dtype):
    rows = documents(LENGTHS)
    cached = open_cache(rows, dtype=dtype).get(rows)["hidden"]
    online = OnlineFeatures(target, TAPS, dtype).get(rows)["hidden"]
    assert cached.dtype == online.dtype == torch.float32
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    for b, row in enumerate(rows):
        length = len(row.ids)
        torch.testing.assert_close(
            cached[b, :length], online[b, :length], atol=1e-5, rtol=tolerance
        )


def test_a_second_run_computes_nothing(open_cache):
    assert open_cache().computed == [0, 1, 2]
    assert open_cache().computed == []


def test_damaged_and_missing_chunks_are_computed_again_to_the_same_bits(open_cache):
    cache = open_cache()
    before = chunk_bytes(cache.folder)
    broken = cache.folder / "chunk-00001.safetensors"
    broken.write_bytes(before[broken.name][:-1] + b"x")
    (cache.folder / "chunk-00002.safetensors").unlink()
    assert open_cache().computed == [1, 2]
    assert chunk_bytes(cache.folder) == before


def test_a_killed_run_is_taken_up_where_it_was(open_cache, monkeypatch):
    whole = chunk_bytes(open_cache().folder)
    folder = open_cache().folder
    for path in folder.iterdir():
        path.unlink()
    real, calls = FeatureCache._compute_chunk, []

    def dies(self, number):
        calls.append(number)
        if number == 2:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(FeatureCache, "_compute_chunk", dies)
    with pytest.raises(KeyboardInterrupt):
        open_cache()
    assert not json.loads((folder / "index.json").read_text())["complete"]
    monkeypatch.setattr(FeatureCache, "_compute_chunk", real)
    assert open_cache().computed == [2]
    assert chunk_bytes(folder) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"rows": documents([10, 11])}, "documents"),
        ({"rows": documents(LENGTHS, answer=5)}, "documents"),
    ],
)
def test_another_fingerprint_is_computed_anew_and_said(open_cache, capsys, change, named):
    open_cache()
    cache = open_cache(**change)
    assert cache.computed == list(range(len(cache.chunks)))
    assert f"other {named}" in capsys.readouterr().out


def test_another_target_is_another_fingerprint(target):
    rows, other = documents([9]), make_target(hidden_size=32)
    mine = caches.fingerprint(target, rows, [], "float32")
    assert mine["target"] != caches.fingerprint(other, rows, [], "float32")["target"]


def test_the_size_cap_is_an_error_before_anything_is_computed(open_cache, tmp_path):
    tokens = sum(LENGTHS)
    with pytest.raises(InputError) as caught:
        open_cache(max_gb=1e-6)
    met, advice = str(caught.value).splitlines()
    assert str(tokens * 4 * 64 * 4) in met and "1e-06" in met
    assert "data.features.max_gb" in advice and "cache=false" in advice
    assert not (tmp_path / "f").exists()


def test_chunks_depend_on_the_documents_alone_and_keep_their_bounds(monkeypatch):
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 48)
    rows = documents([40, 9, 60, 12, 13, 9])
    made = distill.make_chunks(rows)
    assert made == distill.make_chunks(rows[::-1])
    assert sorted(d.row for chunk in made for d in chunk) == [1, 2, 3, 4, 5, 6]
    for chunk in made:
        padded = len(chunk) * max(len(d.ids) for d in chunk)
        assert padded <= 48 or len(chunk) == 1


def test_other_processes_wait_for_the_first_and_then_read_its_files(open_cache, monkeypatch):
    first = open_cache()
    monkeypatch.setattr(chunks, "is_main", lambda: False)
    waits: list[float] = []
    index = first.folder / "index.json"
    finished = index.read_text()
    index.write_text(json.dumps(json.loads(finished) | {"complete": False, "chunks": {}}))

    def sleep(seconds):
        waits.append(seconds)
        index.write_text(finished)

    monkeypatch.setattr(chunks.time, "sleep", sleep)
    rows = documents(LENGTHS)
    other = open_cache(rows)
    assert len(waits) == 1 and other.computed == []
    assert torch.equal(other.get(rows)["hidden"], first.get(rows)["hidden"])
