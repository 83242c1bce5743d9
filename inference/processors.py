"""The logits processors of a call: transformers' own, in transformers' order, the slow ones faster.

A processor here is a function of one prefix and its scores, since it is asked for prefixes that
end in drafted tokens, many of which are rejected.  What keeps state from call to call, runs the
model, or is bound to its row of a batch is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ..heads.errors import InputError
from .warpers import MinP, TopK, TopP, Typical, WhereLaws, faster

if TYPE_CHECKING:
    from .settings import Settings

# Dividing by less would overflow float32 logits of a few hundred million; the law is the argmax.
COLDEST = 1e-30
PREFIX_FREE = (
    TopK,
    TopP,
    MinP,
    Typical,
    WhereLaws,
    stock.TemperatureLogitsWarper,
    stock.TopHLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
BOUND = {
    stock.SynthIDTextWatermarkLogitsProcessor: "it keeps state from call to call",
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor: "it runs the model itself",
    stock.ClassifierFreeGuidanceLogitsProcessor: "it needs a second forward for each token",
    stock.EncoderRepetitionPenaltyLogitsProcessor: "it is bound to its row of a batch",
    stock.EncoderNoRepeatNGramLogitsProcessor: "it is bound to its row of a batch",
    stock.PrefixConstrainedLogitsProcessor: "it is bound to its row of a batch",
}


def chain(settings: Settings, prompt_length: int) -> list[Any]:
    """What `settings` ask for after a prompt of this length.

    A custom processor stands in the place of one of its own type, else before the warpers.
    """
    before = _before_warpers(settings, prompt_length)
    custom = list(settings.logits_processor)
    own = {type(processor): processor for processor in reversed(custom)}
    merged = [own.get(type(processor), processor) for processor in before]
    merged += [processor for processor in custom if not any(processor is m for m in merged)]
    return [faster(p) for p in merged + ([] if settings.greedy else _warpers(settings))]


def _before_warpers(s: Settings, start: int) -> list[Any]:
    eos = list(s.eos_ids)
    forced_bos, bad, decay = (
        s.forced_bos_token_id,
        s.bad_words_ids,
        s.exponential_decay_length_penalty,
    )
    begin = start if start > 1 or forced_bos is None else start + 1
    end = start + (s.max_new_tokens or 0)
    penalty, size, least = s.repetition_penalty, s.no_repeat_ngram_size, s.min_new_tokens
    table: dict[str, tuple] = {
        "sequence_bias": (stock.SequenceBiasLogitsProcessor, s.sequence_bias),
        "repetition_penalty": (stock.RepetitionPenaltyLogitsProcessor, float(penalty)),
        "no_repeat_ngram_size": (stock.NoRepeatNGramLogitsProcessor, int(size)),
        "bad_words_ids": (stock.NoBadWordsLogitsProcessor, bad, eos or None),
        "min_new_tokens": (stock.MinNewTokensLengthLogitsProcessor, start, int(least), eos),
        "forced_bos_token_id": (stock.ForcedBOSTokenLogitsProcessor, forced_bos),
        "forced_eos_token_id": (stock.ForcedEOSTokenLogitsProcessor, end, s.forced_eos_token_id),
        "remove_invalid_values": (stock.InfNanRemoveLogitsProcessor,),
        "exponential_decay_length_penalty": (
            stock.ExponentialDecayLengthPenalty,
            decay,
            eos,
            start,
        ),
        "suppress_tokens": (stock.SuppressTokensLogitsProcessor, s.suppress_tokens),
        "begin_suppress_tokens": (
            stock.SuppressTokensAtBeginLogitsProcessor,
            s.begin_suppress_tokens,
            begin,
        ),
    }
    # Without an end of sequence there is none to forbid or to favour.
    needless = () if eos else ("min_new_tokens", "exponential_decay_length_penalty")
    return [_made(s, n, *row) for n, row in table.items() if n not in needless and _asked(s, n)]


def _warpers(s: Settings) -> list[Any]:
    table: dict[str, tuple] = {
        "temperature": (stock.TemperatureLogitsWarper, max(float(s.temperature), COLDEST)),
        "top_h": (stock.TopHLogitsWarper, s.top_h),
        "top_k": (stock.TopKLogitsWarper, int(s.top_k)),
        "top_p": (stock.TopPLogitsWarper, s.top_p),
        "min_p": (stock.MinPLogitsWarper, s.min_p),
        "typical_p": (stock.TypicalLogitsWarper, s.typical_p),
        "epsilon_cutoff": (stock.EpsilonLogitsWarper, s.epsilon_cutoff),
        "eta_cutoff": (stock.EtaLogitsWarper, s.eta_cutoff),
    }
    return [_made(s, name, *row) for name, row in table.items() if _asked(s, name)]


def _asked(settings: Settings, name: str) -> bool:
    return getattr(settings, name) != type(settings).__dataclass_fields__[name].default


def _made(settings: Settings, name: str, make: Any, *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except (ValueError, TypeError) as error:  # transformers' own checks
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name} is {getattr(settings, name)!r}: {reason}", "Give it as transformers takes it."
        ) from None


def prefix_free(processor: Any) -> bool:
    """True when `processor` does not look at the prefix; a subclass of one that does not may."""
    return type(processor) in PREFIX_FREE


def refuse_bound(custom: Sequence[Any]) -> None:
    """Raises InputError for custom processors that are no function of one prefix."""
    for processor in custom:
        name = type(processor).__name__
        if not callable(processor):
            raise InputError(f"logits_processor holds a {name}", "Give LogitsProcessors.")
        for kind, reason in BOUND.items():
            if isinstance(processor, kind):
                raise InputError(f"{name} cannot be honoured: {reason}", ADVICE)


def probe(processor: Any, prefix: Tensor, scores: Tensor) -> None:
    """Raises InputError where a custom processor gives two answers for one prefix, or scores of
    another shape.

    Args:
        prefix: [1, T] ids.
        scores: [1, V].
    """
    first, second = (processor(prefix, scores.clone()) for _ in range(2))
    name = type(processor).__name__
    if not isinstance(first, Tensor) or first.shape != scores.shape:
        shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise InputError(
            f"{name} returned {shape} for scores of {tuple(scores.shape)}",
            "Return the changed scores, in the same shape.",
        )
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        raise InputError(f"{name} gives two answers for one prefix: it keeps state", ADVICE)


ADVICE = "Pass a LogitsProcessor that looks at its input_ids and scores alone."
