"""SlotCache: ragged rows, kept side branches, growth and selection."""

import pytest
import torch
from calls import Calls
from fixtures import CLOSE, PROMPTS, TARGETS, double, precise

from selfdraft.heads import Draft
from selfdraft.inference.cache import GROWTH, SlotCache
from selfdraft.inference.ragged import Ragged
from selfdraft.inference.target import TargetModel


def states(target: TargetModel, ids: list[int]) -> torch.Tensor:
    """[T, D] states of one pass without a cache."""
    return target.features(torch.tensor([ids]), torch.tensor([len(ids)]), [])["hidden"][0]


def prefilled(target: TargetModel, prompts: list[list[int]], capacity: int = 64) -> SlotCache:
    cache = target.new_cache(len(prompts), capacity)
    longest = max(map(len, prompts))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
    target.prefill(ids, [len(ids) for ids in prompts], cache, [])
    return cache


def read(target: TargetModel, cache: SlotCache, draft: Draft) -> torch.Tensor:
    nodes = draft.ids_BN.shape[1]
    depths = torch.tensor([d + [0] * (nodes - len(d)) for d in draft.depths])
    with torch.no_grad():
        return target.forward(draft.ids_BN, cache, draft.ancestors(), depths, [])["hidden"]


def tree(rows: int, seed: int = 0) -> Draft:
    """Two branches below the root, each going on, and a third child; ids differ by row."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1, 0, 0, 1, 2, 4, 0])
    shape = (rows, len(parents))
    return Draft(
        torch.randint(0, 320, shape, generator=generator),
        parents.expand(shape),
        torch.zeros(shape, dtype=torch.bool),
        torch.ones(shape, dtype=torch.bool),
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_kept_side_branches_equal_recomputing(name: str) -> None:
    """Three rounds of trees, each row keeps a branch of its own, far past a window of 16."""
    target = precise(name)
    texts = [list(ids) for ids in PROMPTS]
    cache = prefilled(target, texts)
    keeps = [[0, 2, 4, 5], [0], [0, 1, 3], [0, 6]]
    for turn in range(3):
        draft = tree(len(texts), turn)
        hidden = read(target, cache, draft)
        for row, ids in enumerate(texts):
            for node in range(draft.ids_BN.shape[1]):
                path = draft.ids_BN[row, draft.path(row, node)].tolist()
                torch.testing.assert_close(
                    hidden[row, node], states(target, ids + path)[-1], **CLOSE[target.dtype]
                )
        paths = keeps[turn:] + keeps[:turn]
        cache.keep(paths)
        for row, path in enumerate(paths):
            texts[row] += draft.ids_BN[row, path].tolist()
        assert cache.lengths == [len(ids) for ids in texts]


def test_all_rows_move_together() -> None:
    """One read and one write a buffer, also where a path is read from where it is written to."""
    cache, paths = SlotCache(3, 4, 64), [[0, 2, 3, 4], [0], [0, 1, 3], [0, 4]]
    cache.lengths = [9, 3, 20, 0]
    for layer in range(3):
        states = torch.randn(4, 2, 5, 8)
        cache.open(5, states.device)
        cache.update(states, states, layer)
    before = [buffer.clone() for buffer in (*cache.keys, *cache.values)]
    with Calls() as calls:
        cache.keep(paths)
    assert calls.names.count("index_put_") == calls.names.count("index") == 6
    assert cache.lengths == [13, 4, 23, 2]
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        for row, (start, path) in enumerate(zip([9, 3, 20, 0], paths, strict=True)):
            kept = old[row, :, [start + node for node in path]]
            assert new[row, :, : start + len(path)].equal(torch.cat([old[row, :, :start], kept], 1))


@pytest.mark.parametrize("lengths", [[4, 4, 4], [9, 0, 2]])
def test_ragged_tokens_are_written_once(lengths: list[int]) -> None:
    """As padded ones are, by one write a buffer and without any set-up in a layer."""
    valid_BN = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    layout, states = Ragged(valid_BN), torch.randn(3, 2, 3, 8)
    padded, closed = (SlotCache(1, 3, 64) for _ in range(2))
    for cache in (padded, closed):
        cache.lengths = list(lengths)
    padded.open(3, states.device)
    padded.update(states, states, 0)
    closed.open(3, states.device, layout)
    flat = layout.close(states.transpose(1, 2)).transpose(1, 2)
    closed.update(flat, flat, 0)  # allocates
    with Calls() as calls:
        closed.update(flat, flat, 0)
    assert calls.names.count("index_put_") == 2
    assert not {"arange", "zeros", "new_zeros", "index_copy_"} & {*calls.names}
    for one, other in zip(padded.keys, closed.keys, strict=True):
        for row, (start, valid) in enumerate(zip(lengths, valid_BN.sum(1).tolist(), strict=True)):
            slots = slice(start, start + valid)
            assert one[row, :, slots].equal(other[row, :, slots])


def test_rows_of_unlike_drafts() -> None:
    """A padded row's last nodes disturb nobody."""
    target = double()
    cache = prefilled(target, PROMPTS[:2])
    draft = tree(2)
    draft.valid_BN[1, 3:] = False
    hidden = read(target, cache, draft)
    for row, nodes in enumerate([7, 3]):
        for node in range(nodes):
            path = draft.ids_BN[row, draft.path(row, node)].tolist()
            expected = states(target, PROMPTS[row] + path)[-1]
            torch.testing.assert_close(hidden[row, node], expected, **CLOSE[target.dtype])


def test_rejected_slots_are_overwritten_and_never_read() -> None:
    target = double()
    cache = prefilled(target, PROMPTS[:2])
    read(target, cache, tree(2))
    cache.keep([[0], [0, 1]])
    for buffer in (*cache.keys, *cache.values):
        for row, length in enumerate(cache.lengths):
            buffer[row, :, length:] = 1e3  # whatever a rejected draft left there
    draft = Draft.chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    hidden = read(target, cache, draft)
    roots = tree(2).ids_BN
    texts = [PROMPTS[0] + roots[0, :1].tolist(), PROMPTS[1] + roots[1, :2].tolist()]
    for row, ids in enumerate(texts):
        expected = states(target, ids + draft.ids_BN[row].tolist())[-3:]
        torch.testing.assert_close(hidden[row], expected, **CLOSE[target.dtype])


def test_grows_and_keeps_what_it_holds() -> None:
    target = double("llama", max_position_embeddings=2 * GROWTH)
    prompts = [list(range(GROWTH - 3)), [4, 5]]
    cache = prefilled(target, prompts, capacity=GROWTH - 3)
    assert cache.capacity == GROWTH
    hidden = read(target, cache, tree(2))
    assert cache.capacity == 2 * GROWTH
    assert cache.keys[0].shape[2] == 2 * GROWTH
    for row, ids in enumerate(prompts):
        path = tree(2).ids_BN[row, [0, 2, 4, 5]].tolist()
        expected = states(target, ids + path)[-1]
        torch.testing.assert_close(hidden[row, 5], expected, **CLOSE[target.dtype])


def test_select_takes_rows_in_order() -> None:
    target = double()
    cache = prefilled(target, PROMPTS)
    cache.select([3, 1])
    assert cache.lengths == [len(PROMPTS[3]), len(PROMPTS[1])]
    assert cache.get_seq_length() == 30
    draft = Draft.chain(torch.tensor([[5, 6], [7, 8]]))
    hidden = read(target, cache, draft)
    for row, ids in enumerate([PROMPTS[3], PROMPTS[1]]):
        expected = states(target, ids + draft.ids_BN[row].tolist())[-2:]
        torch.testing.assert_close(hidden[row], expected, **CLOSE[target.dtype])


def test_layers_are_those_of_the_target() -> None:
    cache = double().new_cache(3, 1)
    assert len(cache.keys) == len(cache.values) == TARGETS["llama"]["num_hidden_layers"]
    assert cache.lengths == [0, 0, 0]
