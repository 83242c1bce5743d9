"""The settings of a generation call: what may be asked for, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..heads.errors import InputError, nearest
from .processors import chain, refuse_bound

REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "Beam search keeps several paths; leave num_beams at 1."),
    "num_beam_groups": (1, "Beam search keeps several paths; leave num_beam_groups at 1."),
    "constraints": (None, "They belong to beam search; force tokens with a logits_processor."),
    "force_words_ids": (None, "They belong to beam search; force tokens with a logits_processor."),
    "penalty_alpha": (0, "Contrastive search is no law to keep; use do_sample with top_k."),
    "dola_layers": (None, "DoLa needs the logits of several layers; leave it out."),
    "guidance_scale": (1, "Guidance needs a second forward for each token; leave it out."),
    "prompt_lookup_num_tokens": (None, "Give a drafter to Speculator.from_pretrained."),
    "use_mtp": (False, "Give heads to Speculator.from_pretrained."),
    "assistant_early_exit": (None, "Give heads to Speculator.from_pretrained."),
    "encoder_repetition_penalty": (1, "Use repetition_penalty, or a logits_processor."),
    "encoder_no_repeat_ngram_size": (0, "Use no_repeat_ngram_size, or a logits_processor."),
    "return_dict_in_generate": (
        False,
        "Ids alone are returned; leave it at False.",
    ),
    "output_scores": (False, "Scores of drafted tokens are not kept; leave it out."),
    "output_logits": (False, "Logits of drafted tokens are not kept; leave it out."),
}
"""Settings of transformers' generate that drafting cannot honour: the value that asks for nothing,
and what to do instead."""

OTHERWISE = {
    "assistant_model": "Give a drafter to Speculator.from_pretrained.",
    "watermarking_config": "Pass a WatermarkLogitsProcessor in logits_processor.",
    "prefix_allowed_tokens_fn": "Pass a logits_processor; it sees each row's own prefix.",
    "stopping_criteria": "Use stop_strings, or target_model.generate(custom_generate=...).",
    "streamer": "Use Speculator.stream.",
    "generation_config": "Name its settings one by one.",
    "max_length": "Use max_new_tokens, which does not count the prompt.",
    "min_length": "Use min_new_tokens, which does not count the prompt.",
}
"""Arguments of transformers' generate that have another form here."""


@dataclass(frozen=True)
class Settings:
    """What a caller may ask for, by transformers' names.  Defaults are plain: nothing truncated,
    temperature 1.

    Attributes:
        do_sample: False takes the argmax.
        temperature: of the softmax; 0 is greedy.
        top_k: 0 for all.
        top_p, typical_p: 1.0 for all.
        min_p, top_h: None for all.
        epsilon_cutoff, eta_cutoff: 0.0 for all.
        repetition_penalty: 1.0 for none (arXiv 1909.05858), over prompt and output.
        no_repeat_ngram_size: n-grams of this size occur once, in prompt and output; 0 for no rule.
        sequence_bias: [[ids], bias] pairs; the bias is added to the last id after the others.
        bad_words_ids: sequences that are never completed.
        min_new_tokens: no EOS before.
        forced_bos_token_id: follows a prompt of one token.
        forced_eos_token_id: id or ids, the max_new_tokens-th token.
        exponential_decay_length_penalty: (start, factor): EOS grows likelier from there on.
        suppress_tokens, begin_suppress_tokens: never, and never as the first new token.
        remove_invalid_values: NaN and infinite logits become finite.
        logits_processor: custom `LogitsProcessor`s: functions of one prefix and its scores, run
            before the warpers (temperature and what follows it), or in the place of the one that a
            setting of theirs asks for.
        eos_ids, max_new_tokens: of the call; several settings refer to them.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    sequence_bias: Any = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    exponential_decay_length_penalty: Any = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    remove_invalid_values: bool = False
    logits_processor: Sequence[Any] = ()
    eos_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        for names, fine, wanted in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is None and name in ("min_p", "top_h"):
                    continue
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not abs(value) <= LARGEST or not fine(value):
                    raise InputError(f"{name} is {value!r}", f"Give {wanted}.")
        for name in ("do_sample", "remove_invalid_values"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}", "Give True or False.")
        if not isinstance(self.logits_processor, list | tuple):
            kind = type(self.logits_processor).__name__
            raise InputError(f"logits_processor is a {kind}", "Give a list of LogitsProcessors.")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            if not isinstance(getattr(self, name), list | tuple | None):
                raise InputError(f"{name} is {getattr(self, name)!r}", "Give a list of ids.")
        refuse_bound(self.logits_processor)
        self.processors(1)  # raises for what transformers does not take

    @property
    def greedy(self) -> bool:
        """True when each law is its argmax."""
        return not self.do_sample or self.temperature == 0

    def processors(self, prompt_length: int) -> list[Any]:
        """The logits processors of a row whose prompt has this length, in transformers' order."""
        return chain(self, prompt_length)

    def token_ids(self) -> dict[str, list[Any]]:
        """The ids that each setting names."""
        bias = self.sequence_bias or []
        if not isinstance(bias, dict):
            bias = [sequence for sequence, _ in bias]
        forced = self.forced_eos_token_id
        several = list(forced) if isinstance(forced, list | tuple) else [forced]
        named: dict[str, list[Any]] = {
            "sequence_bias": [i for sequence in bias for i in sequence],
            "bad_words_ids": [i for word in self.bad_words_ids or [] for i in word],
            "forced_bos_token_id": [self.forced_bos_token_id],
            "forced_eos_token_id": several,
            "suppress_tokens": list(self.suppress_tokens or []),
            "begin_suppress_tokens": list(self.begin_suppress_tokens or []),
        }
        return {name: [i for i in ids if i is not None] for name, ids in named.items()}


LARGEST = 1e38  # float32, in which laws are made, holds little more


def _whole(x: float) -> bool:
    return x == int(x) and x >= 0


RANGES: list[tuple[str, Callable[[float], bool], str]] = [
    ("temperature", lambda x: x >= 0, "a number in [0, 1e38]"),
    ("top_k no_repeat_ngram_size", _whole, "an integer >= 0, 0 for no rule"),
    ("min_new_tokens", _whole, "an integer >= 0"),
    ("top_p typical_p", lambda x: 0 < x <= 1, "a number in (0, 1]"),
    ("min_p", lambda x: 0 <= x <= 1, "None or a number in [0, 1]"),
    ("top_h", lambda x: 0 < x <= 1, "None or a number in (0, 1]"),
    ("epsilon_cutoff eta_cutoff", lambda x: 0 <= x < 1, "a number in [0, 1)"),
    ("repetition_penalty", lambda x: 1e-30 <= x <= 1e30, "a number in [1e-30, 1e30]"),
]
OF_THE_CALL = ("eos_ids", "max_new_tokens")


def settings_for(
    given: dict[str, Any], *, call: Iterable[str], eos_ids: set[int], vocab: int, tokens: int
) -> Settings:
    """The settings of a generation call; None leaves a setting at its default.

    Args:
        given: keyword arguments.
        call: names that the call itself takes, for the advice on an unknown one.
        eos_ids, vocab: of the target.
        tokens: max_new_tokens.
    Raises:
        InputError: an unknown name, one that cannot be honoured, a value or an id out of range.
    """
    known = [f.name for f in fields(Settings) if f.name not in OF_THE_CALL]
    wanted = {}
    for name, value in given.items():
        if name in known:
            wanted[name] = value
        elif name in REFUSED:
            refuse(name, value)
        elif name in OTHERWISE:
            raise InputError(f"generate does not take {name}", OTHERWISE[name])
        else:
            raise InputError(f"generate does not take {name!r}", nearest(name, [*known, *call]))
    # Tensors and arrays, which transformers takes too, as lists and numbers.
    wanted = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in wanted.items()
        if value is not None
    }
    settings = Settings(**wanted, eos_ids=tuple(sorted(eos_ids)), max_new_tokens=tokens)
    for name, ids in settings.token_ids().items():
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise InputError(
                    f"{name} has id {token!r}, the target's vocabulary has {vocab}",
                    "Give token ids of the target.",
                )
    if isinstance(tokens, int) and settings.min_new_tokens > tokens > 0:
        raise InputError(
            f"min_new_tokens is {settings.min_new_tokens}, max_new_tokens is {tokens}",
            "Ask for no more than max_new_tokens.",
        )
    return settings


def refuse(name: str, value: Any) -> None:
    """Raises InputError for a setting of `REFUSED` that asks for something."""
    neutral, advice = REFUSED[name]
    if value is not None and value != neutral:
        raise InputError(f"{name}={value!r} cannot be honoured by drafting", advice)
