"""What a generation call reports of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PARTS = ("prefill", "draft", "target", "verify", "host")


@dataclass
class Stats:
    """Counts and times of a call, summed over its rows.

    Attributes:
        rows: sequences generated.
        tokens: new tokens emitted, a final EOS included.
        rounds: rounds of all rows; one round of a row is one target forward over its draft.  The
            prefill, which gives each row's first token, is no round.
        forwards: target forwards, the prefills included.
        drafted_by_depth, accepted_by_depth: rounds that drafted, and that emitted, at least this
            many tokens of the draft; tokens cut by EOS, a stop or the limit are not counted.
        drafted_by, accepted_by: nodes that each drafter proposed, and those of them that were
            emitted; a node that several proposed counts for each.
        seconds: by part: prefill, draft, target (forward and lm_head), verify (laws and the
            acceptance rule), host (the rest).  On a GPU work is asynchronous, so that its time
            shows where the result is waited for.
    """

    rows: int = 0
    tokens: int = 0
    rounds: int = 0
    forwards: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def tokens_per_round(self) -> float:
        """tau: tokens a round, the bonus or corrected token included, the prefill's first token
        left out; 1.0 is plain decoding."""
        return (self.tokens - self.rows) / self.rounds if self.rounds else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the rounds that drafted to a depth in which that depth was emitted."""
        pairs = zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the time of the block to `seconds[part]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def count_round(self, drafted: int, emitted: int, tokens: int) -> None:
        """One round of one row: deepest draft, draft tokens emitted, all tokens emitted."""
        longest = max(drafted, len(self.drafted_by_depth))
        for counts, reached in (
            (self.drafted_by_depth, drafted),
            (self.accepted_by_depth, emitted),
        ):
            counts.extend([0] * (longest - len(counts)))
            for depth in range(reached):
                counts[depth] += 1
        self.rounds += 1
        self.tokens += tokens

    def count_drafters(self, names: Sequence[str], bits: list[int], emitted: list[int]) -> None:
        """Who proposed what in one round of one row.

        Args:
            bits: for each node, which of `names` proposed it, as bits.
            emitted: the nodes that were emitted.
        """
        for bit, name in enumerate(names):
            drafted = sum(b >> bit & 1 for b in bits)
            accepted = sum(bits[node] >> bit & 1 for node in emitted)
            self.drafted_by[name] = self.drafted_by.get(name, 0) + drafted
            self.accepted_by[name] = self.accepted_by.get(name, 0) + accepted
