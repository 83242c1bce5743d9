"""The round: propose -> target forward over the draft -> verify -> keep -> advance.

Plain decoding is the same loop with an empty draft.  Rows are ragged: each advances by what it
accepted, and leaves the batch when it is done.

Shape suffixes: B rows, T tokens, N draft nodes, M committed tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..heads.draft import Draft, Plan, padded
from ..heads.errors import InputError
from ..heads.protocols import Drafter, Features, Paths, Purpose
from .noise import RowNoise
from .prefill import forwards
from .ragged import ragged
from .sampling import RowSampling
from .settings import Settings
from .statistics import Stats
from .target import TargetModel
from .verifier import Verdict, verify

DRAFT_ROOM = 32  # slots that a new cache has for a draft


class Commit(NamedTuple):
    """Tokens that a round emits for one row; `finish` says why the row ends, if it does."""

    row: int
    tokens: list[int]
    finish: str | None


class Record(Protocol):
    """Collects the target's states of the tokens that rows read.

    Attributes:
        taps: layers wanted beside the final state.
    """

    taps: list[int]

    def add(self, row: int, features: Features) -> None:
        """States [M, ..] of the next M tokens that row `row` has read."""


def check_record(drafter: Drafter, record: Record | None) -> None:
    """Raises InputError where one pass cannot serve both: features hold one set of taps."""
    if record is not None and drafter.taps not in ([], record.taps):
        raise InputError(
            f"the record wants taps {record.taps}, the drafter reads taps {drafter.taps}",
            "Record the drafter's taps, or draft without heads while recording.",
        )


@dataclass
class Row:
    """One sequence on its way.

    Attributes:
        index: its place in the call.
        seen: what logits processors take for the prompt; the prompt itself when None.
        limit: new tokens at most.
        stop: called with all new tokens after each one; True ends the row there.
        new: tokens emitted so far.
    """

    index: int
    prompt: list[int]
    seed: int
    limit: int
    eos_ids: set[int]
    seen: list[int] | None = None
    limit_reason: str = "length"
    stop: Callable[[list[int]], bool] | None = None
    new: list[int] = field(default_factory=list)
    finish: str | None = None

    def emit(self, tokens: list[int]) -> Commit:
        """Takes `tokens` up to the first that ends the row."""
        before = len(self.new)
        for token in tokens:
            self.new.append(token)
            if token in self.eos_ids:
                self.finish = "eos"
            elif self.stop is not None and self.stop(self.new):
                self.finish = "stop"
            elif len(self.new) == self.limit:
                self.finish = self.limit_reason
            if self.finish:
                break
        return Commit(self.index, self.new[before:], self.finish)


class Batch:
    """Rows that are decoded together."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        rows: list[Row],
        settings: Settings,
        plan: Plan,
        stats: Stats,
        record: Record | None = None,
    ) -> None:
        rows = sorted(rows, key=lambda row: len(row.prompt))  # so that like ones are read together
        self.target, self.drafter, self.rows = target, drafter, rows
        self.plan, self.stats, self.record = plan, stats, record
        self.taps = sorted({*drafter.taps, *(record.taps if record else [])})
        self.sampling = RowSampling(settings, [list(row.seen or row.prompt) for row in rows])
        longest = max(len(row.prompt) + row.limit for row in rows)
        first = max(len(row.prompt) for row in rows)
        # Memory for what most answers and a draft need; the cache grows when more is needed.
        capacity = min(longest, first + 1024) + DRAFT_ROOM
        self.cache = target.new_cache(len(rows), capacity)

    def prefill(self) -> list[Commit]:
        """Reads the prompts and draws each row's first root like any other token."""
        target, rows, stats = self.target, self.rows, self.stats
        lengths = [len(row.prompt) for row in rows]
        with stats.timed("prefill"):
            ids_BT = padded([[*row.prompt, 0] for row in rows], 0, target.device)
            features = target.prefill(ids_BT[:, :-1], lengths, self.cache, self.taps)
            last_B = torch.tensor(lengths, device=target.device) - 1
            hidden_BD = features["hidden"][torch.arange(len(rows)), last_B]
            laws = self.sampling.laws(target.logits(hidden_BD), lambda b: (b, []))
            roots = laws.tolist() if self.sampling.greedy else self._draw(laws, lengths)
            ids_BT[torch.arange(len(rows)), last_B + 1] = torch.tensor(roots, device=target.device)
            self.state = self.drafter.start(ids_BT, last_B + 1, features)
        if self.record is not None:
            for b, row in enumerate(rows):
                self.record.add(row.index, {k: v[b, : lengths[b]] for k, v in features.items()})
        stats.rows += len(rows)
        stats.tokens += len(rows)
        stats.forwards += forwards(lengths)
        verdicts = [Verdict([], [root]) for root in roots]
        commits = self._commit(verdicts, None)
        self._retire(verdicts, {})
        return commits

    def _draw(self, laws_BV: Tensor, lengths: list[int]) -> list[int]:
        noise = self._noise(lengths)
        return [noise.categorical(p, b, 0, Purpose.RESIDUAL) for b, p in enumerate(laws_BV)]

    def _noise(self, lengths: list[int]) -> RowNoise:
        rows = self.rows
        return RowNoise([row.seed for row in rows], lengths, [row.index for row in rows])

    def round(self) -> list[Commit]:
        """One round of every row."""
        target, stats, sampling = self.target, self.stats, self.sampling
        history = sampling.history
        root_B = torch.tensor([ids[-1] for ids in history], device=target.device)
        # A round emits the accepted tokens and one more.
        room = [row.limit - len(row.new) - 1 for row in self.rows]
        noise = self._noise([len(ids) for ids in history])
        with stats.timed("draft"):
            plan = self.plan.shared(len(self.rows))
            # What a seed gives may not depend on the rows beside it; greedy text does not anyway.
            if sampling.greedy or max(room) == 0:
                plan = plan.priced(len(self.rows)).capped(max(room))
            draft = self.drafter.propose(self.state, root_B, plan, sampling, noise)
            draft = draft.shortened(room)
        with stats.timed("target"):
            features = target.forward(
                draft.ids_BN,
                self.cache,
                draft.ancestors(),
                None if draft.is_chain else draft.depth_BN(),
                self.taps,
                draft.valid_BN,
            )
            logits_MV = target.logits(_of_nodes(features["hidden"], draft))
        with stats.timed("verify"):
            laws = sampling.laws(logits_MV, _paths(draft)).split([len(row) for row in draft.tokens])
            verdicts = verify(draft, laws, noise)
        stats.forwards += 1
        if self.record is not None:
            for b, row in enumerate(self.rows):
                path = verdicts[b].path
                self.record.add(row.index, {k: v[b, path] for k, v in features.items()})
        self.cache.keep([verdict.path for verdict in verdicts])
        commits = self._commit(verdicts, draft)
        verdicts, features = self._retire(verdicts, features)
        if self.rows:
            self._advance(verdicts, features)
        return commits

    def _commit(self, verdicts: list[Verdict], draft: Draft | None) -> list[Commit]:
        """Emits what a round, or without a draft the prefill, has decided, and counts it."""
        commits = []
        for b, (row, verdict) in enumerate(zip(self.rows, verdicts, strict=True)):
            commit = row.emit(verdict.tokens)
            self.sampling.history[b] += verdict.tokens
            if draft is not None:
                self._count(draft, b, verdict.path, len(commit.tokens))
            commits.append(commit)
        return commits

    def _count(self, draft: Draft, row: int, path: list[int], tokens: int) -> None:
        emitted = path[1 : tokens + 1]
        self.stats.count_round(max(draft.depths[row]), len(emitted), tokens)
        names = draft.names or (self.drafter.name,)
        nodes = len(draft.depths[row])
        bits = draft.sources[row] if draft.sources else [0] + [1] * (nodes - 1)
        self.stats.count_drafters(names, bits, emitted)

    def _retire(
        self, verdicts: list[Verdict], features: Features
    ) -> tuple[list[Verdict], Features]:
        """Drops the rows that have ended, from the batch and from what it gives back."""
        alive = _closed_up([not row.finish for row in self.rows])
        if len(alive) == len(self.rows):
            return verdicts, features
        self.rows = [self.rows[b] for b in alive]
        if alive:
            self.cache.select(alive)
            self.sampling = self.sampling.select(alive)
            self.state = self.state.select(torch.tensor(alive, device=self.target.device))
        kept = {name: value[alive] for name, value in features.items()}
        return [verdicts[b] for b in alive], kept

    def _advance(self, verdicts: list[Verdict], features: Features) -> None:
        """Hands the committed tokens and their states to the drafter."""
        device = self.target.device
        nodes_BM = padded([verdict.path for verdict in verdicts], 0, device)
        rows_B1 = torch.arange(len(verdicts), device=device)[:, None]
        path_features = {name: value[rows_B1, nodes_BM] for name, value in features.items()}
        committed_BM = padded([verdict.tokens for verdict in verdicts], 0, device)
        count_B = torch.tensor([len(verdict.path) for verdict in verdicts], device=device)
        with self.stats.timed("draft"):
            self.state = self.drafter.advance(self.state, committed_BM, count_B, path_features)


@torch.inference_mode()
def decode(
    target: TargetModel,
    drafter: Drafter,
    rows: list[Row],
    settings: Settings,
    plan: Plan,
    stats: Stats,
    record: Record | None = None,
) -> Iterator[list[Commit]]:
    """Decodes `rows` together and yields what each round emits, the prefill's tokens first."""
    start = time.perf_counter()
    before = sum(stats.seconds.values())
    batch = Batch(target, drafter, rows, settings, plan, stats, record)
    commits = batch.prefill()
    while True:
        spent = time.perf_counter() - start
        yield commits
        start += time.perf_counter() - start - spent  # the caller's time is not ours
        if not batch.rows:
            break
        commits = batch.round()
    parts = sum(stats.seconds.values()) - before
    stats.seconds["host"] += max(0.0, time.perf_counter() - start - parts)


def _closed_up(alive: list[bool]) -> list[int]:
    """The rows that are alive, the last ones moved into the places of those that are not: rows may
    stand in any order, and few are moved in the cache."""
    kept = sum(alive)
    movers = [b for b in range(kept, len(alive)) if alive[b]]
    return [b if alive[b] else movers.pop() for b in range(kept)]


def _of_nodes(value_BND: Tensor, draft: Draft) -> Tensor:
    """[M, D] of the nodes that are there, row after row."""
    layout = ragged(draft.valid_BN, value_BND.device)
    return value_BND.flatten(0, 1) if layout is None else layout.close(value_BND)[0]


def _paths(draft: Draft) -> Paths:
    """Rows and paths of the nodes that are there, looked up only when asked for."""
    nodes = [(row, node) for row, ids in enumerate(draft.tokens) for node in range(len(ids))]

    def path(m: int) -> tuple[int, list[int]]:
        row, node = nodes[m]
        return row, [draft.tokens[row][n] for n in draft.path(row, node)[1:]]

    return path
