"""What the reports of timings and of watched drafts say."""

import pytest
from fixtures import make_head, tiny

from selfdraft.scripts import bench
from selfdraft.scripts.acceptance import Watched
from selfdraft.scripts.bench_report import Method, Run, row


def test_rows_of_a_report_by_hand():
    def method(name: str, seconds: float, ids: list[int]) -> Method:
        runs = [Run(ids, seconds, 2.0, {"prefill": 1.0}), Run([7], 2.0, 1.0, {"prefill": 1.0})]
        return Method(name, lambda prompt: ([], 0.0, {}), runs)

    plain, fast = method("plain", 5.0, [1, 2, 3]), method("fast", 3.0, [1, 2, 4])
    found = row(fast, {"plain": plain, "fast": fast}, ["a", "b"])
    assert found["tokens"] == 4 and found["speedup_vs_plain"] == pytest.approx(7 / 5)
    assert found["decode_speedup_vs_plain"] == pytest.approx(5 / 3)
    assert found["tokens_per_round"] == pytest.approx(2 / 3) and found["identical"] == "1/2"
    assert found["median_speedup_vs_plain"] == pytest.approx((5 / 3 + 1) / 2)
    assert found["speedup_vs_hf"] is found["median_speedup_vs_hf"] is None
    # 3/5 - 5/7 and 2/5 - 2/7 of the seconds: 7/5 * sqrt(2 * (4/35)^2 * 2)
    assert found["speedup_vs_plain_se"] == pytest.approx(0.32)
    assert row(plain, {"plain": plain}, ["a", "b"])["speedup_vs_plain_se"] == 0
    one = [Method(m.name, m.generate, m.runs[:1]) for m in (plain, fast)]
    assert row(one[1], {"plain": one[0]}, ["a"])["speedup_vs_plain_se"] is None
    assert found["by_category"]["b"]["speedup_vs_plain"] == 1
    assert found["seconds_by_part"] == {"prefill": 2.0}
    assert row(fast, {"plain": plain}, ["a", "b"], greedy=False)["identical"] is None


def test_watched_chains_are_accepted_with_the_chance_that_is_noted():
    """A sum of (accepted - chance) has mean 0 and variance sum c(1 - c)."""
    target, tokens = tiny(), 60
    head = make_head("hydra", target.spec, depth=3)
    total = [[0.0] * 3 for _ in range(3)]
    for prompt in range(8):
        watched = Watched(head, target, 3.0, tokens)
        spec = bench.Speculator(target, watched, 3)
        asked = {"do_sample": True, "temperature": 3.0, "seed": prompt}
        out = spec.generate([prompt + 1, 5, 9], max_new_tokens=tokens, **asked)
        assert watched.accepted[0] <= out.stats.accepted_by_depth[0]
        for sums, part in zip(
            total, (watched.judged, watched.accepted, watched.chance), strict=True
        ):
            sums[:] = [a + b for a, b in zip(sums, part, strict=True)]
    judged, accepted, chance = total
    assert judged[0] > 200 and judged[1] == accepted[0] > 20
    bound = 4 * (judged[0] / 4) ** 0.5
    assert abs(accepted[0] - chance[0]) < bound and 0 < chance[0] < judged[0]
