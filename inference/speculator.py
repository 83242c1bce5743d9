"""Speculator: what users call.  Loads a target and a drafter, and generates with both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..heads.draft import Plan
from ..heads.errors import InputError, check_count, check_switch
from ..heads.protocols import Drafter
from .assembly import (
    build_drafter,
    build_target,
    check_drafter,
    check_names,
    local_folder,
)
from .decode import Record, Row, check_record, decode
from .drafters import Plain
from .planner import build_plan, default_plan
from .prompts import prompt_ids, stop_rule
from .settings import Settings, settings_for
from .statistics import Stats
from .target import TargetModel

STREAM_ARGUMENTS = ("max_new_tokens", "stop_strings", "seed", "chat", "stats")
CALL_ARGUMENTS = (*STREAM_ARGUMENTS[:-1], "num_return_sequences", "batch_size", "record")


@dataclass
class Generation:
    """What `Speculator.generate` returns.

    Attributes:
        texts: new text of each row, special tokens left out.
        token_ids: new tokens of each row, a final EOS included.
        finish_reasons: eos, stop, length (max_new_tokens) or positions (the target has no more).
        stats: counts and times, summed over the rows.
    """

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    stats: Stats


class Speculator:
    """A target and its drafter.

    Args:
        target: the frozen model.
        drafter: None decodes plainly.
        plan: draft length, a Plan, or "measured"; None for chains as long as the drafter has
            them.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        plan: Plan | int | str | None = None,
    ) -> None:
        self.target = target
        self.drafter: Drafter = drafter or Plain()
        self.plan = plan

    @property
    def plan(self) -> Plan:
        """How much is drafted; takes what the constructor takes."""
        return self._plan

    @plan.setter
    def plan(self, asked: Plan | int | str | None) -> None:
        self._plan = build_plan(asked, self.drafter, self.target)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path | None = None,
        *,
        target: str | Path | nn.Module | TargetModel | None = None,
        drafter: str | Path | nn.Module | Drafter | None = None,
        tokenizer: Any = None,
        plan: Plan | int | str | None = None,
        allow_other_target: bool = False,
        widen: bool = False,
        **named: Any,
    ) -> Speculator:
        """Loads trained heads with the target that they name.

        Args:
            heads: a head's folder or hub id.
            target: instead of the target named there: a name, or a loaded PreTrainedModel, which
                is not modified.
            drafter: "heads+ngram" (in one tree, the default with heads), "heads", "ngram", "none",
                a draft model or its name, or any `Drafter`.
            tokenizer: of a loaded model; None when prompts are ids.
            plan: draft length, or a Plan; None for a tree of the nodes that are likely enough to
                pay (`planner.default_plan`), "measured" for one that goes by what a node costs on
                this machine, which is the default where that is no CPU.
            allow_other_target: accept heads trained for other weights of the same sizes.
            widen: draft over the ids of each row's own prompt and output beside the draft
                vocabulary.
            named: gguf_file=, dtype=, device=, device_map=, adapter=, revision= of the target.
        Raises:
            InputError: names, files or arguments that do not fit.
        """
        check_names(heads, target, tokenizer, named)
        check_switch("allow_other_target", allow_other_target)
        check_drafter(drafter, heads, widen)
        folder = None if heads is None else local_folder(str(heads))
        model = build_target(target, folder, tokenizer, named)
        options = {"allow_other_target": allow_other_target, "widen": widen}
        drafts = build_drafter(drafter, model, folder, **options)
        return cls(model, drafts, default_plan(drafts, model) if plan is None else plan)

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        seed: int | list[int] = 0,
        num_return_sequences: int = 1,
        chat: bool = True,
        batch_size: int = 32,
        record: Record | None = None,
        **sampling: Any,
    ) -> Generation:
        """Generates for one prompt or a list of prompts.

        Args:
            prompts: text, messages or ids; or a list of these.  Text goes through the chat
                template where the tokenizer has one, unless chat=False.
            max_new_tokens: exact, but for EOS, stop strings and the target's positions.
            stop_strings: the token that completes one of them is the last.
            seed: an int s gives output row i the seed s + i; a list gives one a row.
            batch_size: rows decoded together at most.
            record: is handed the target's states of every token read, by output row.
            sampling: fields of `Settings`, by transformers' names: do_sample, temperature, top_k,
                top_p, min_p, repetition_penalty, logits_processor and others.
        Raises:
            InputError: a bad prompt or argument.
        """
        settings = self._settings(sampling, max_new_tokens, CALL_ARGUMENTS)
        ids, _ = prompt_ids(self.target, prompts, chat)
        check_count("num_return_sequences", num_return_sequences)
        check_count("batch_size", batch_size)
        check_record(self.drafter, record)
        ids = [row for row in ids for _ in range(num_return_sequences)]
        stop = stop_rule(self.target, stop_strings)
        rows = self._rows(ids, max_new_tokens, seed, stop)
        stats = Stats()
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            for _ in decode(self.target, self.drafter, batch, settings, self.plan, stats, record):
                continue
        return Generation(
            [self._text(row.new) for row in rows],
            [row.new for row in rows],
            [row.finish or "length" for row in rows],
            stats,
        )

    def stream(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        chat: bool = True,
        stats: Stats | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yields the text of one prompt's answer, piece by piece; arguments as in `generate`.

        Args:
            stats: filled in while the text comes.
        """
        settings = self._settings(sampling, max_new_tokens, STREAM_ARGUMENTS)
        ids, many = prompt_ids(self.target, prompt, chat)
        if many or self.target.tokenizer is None:
            raise InputError("stream takes one prompt and needs a tokenizer", "Use generate.")
        stop = stop_rule(self.target, stop_strings)
        rows = self._rows(ids, max_new_tokens, seed, stop)
        if not isinstance(stats, Stats | None):
            raise InputError(f"stats is a {type(stats).__name__}", "Give a Stats, or leave it out.")
        counts = Stats() if stats is None else stats
        return self._stream(rows, settings, counts)

    def _stream(self, rows: list[Row], settings: Settings, stats: Stats) -> Iterator[str]:
        (row,), start, shown = rows, 0, 0
        for _ in decode(self.target, self.drafter, rows, settings, self.plan, stats):
            # Behind the tokens shown last, since tokenizers strip the space before a text.
            before, text = self._text(row.new[start:shown]), self._text(row.new[start:])
            # An incomplete character is held back until its last byte has come.
            if len(text) > len(before) and (row.finish or not text.endswith("�")):
                yield text[len(before) :]
                start, shown = shown, len(row.new)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """`target_model.generate(ids, custom_generate=spec)`: transformers' left-padded ids in,
        the same form out.  Its own processors and stopping criteria are honoured; a streamer is
        not handed on by transformers."""
        from .custom_generate import run

        # The decoder, since an adapter's wrapper hands on the model that it wraps.
        if model.get_decoder() is not self.target.decoder:
            raise InputError(
                f"custom_generate on a {type(model).__name__} that is not this Speculator's target",
                "Call generate on the model that it was made of (spec.target.model).",
            )
        # transformers passes a mask twice where the signature names one.
        return run(self, input_ids, kwargs, logits_processor, stopping_criteria, generation_config)

    def _settings(
        self, given: dict[str, Any], max_new_tokens: int, call: Sequence[str]
    ) -> Settings:
        check_count("max_new_tokens", max_new_tokens)
        return settings_for(
            given,
            call=call,
            eos_ids=self.target.eos_ids,
            vocab=self.target.vocab_size,
            tokens=max_new_tokens,
        )

    def _rows(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        seed: int | list[int],
        stop: Callable[[list[int]], bool] | None,
    ) -> list[Row]:
        given = seed if isinstance(seed, list) else [seed]
        if not all(isinstance(s, int) and not isinstance(s, bool) for s in given):
            raise InputError(f"seed is {seed!r}", "Give an integer, or a list of one a row.")
        seeds = seed if isinstance(seed, list) else [seed + i for i in range(len(prompts))]
        if len(seeds) != len(prompts):
            raise InputError(f"{len(seeds)} seeds for {len(prompts)} rows", "Give one a row.")
        rows = []
        for index, (ids, row_seed) in enumerate(zip(prompts, seeds, strict=True)):
            positions = self.target.max_positions - len(ids)
            limit = min(max_new_tokens, positions)
            reason = "length" if limit == max_new_tokens else "positions"
            eos_ids = self.target.eos_ids
            rows.append(Row(index, ids, row_seed, limit, eos_ids, limit_reason=reason, stop=stop))
        return rows

    def _text(self, ids: list[int]) -> str:
        tokenizer = self.target.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
