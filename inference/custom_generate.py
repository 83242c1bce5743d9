"""The drop-in for transformers users: `model.generate(ids, custom_generate=spec)`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..heads.errors import InputError
from .decode import Row, decode
from .prompts import check_ids
from .settings import REFUSED, Settings, refuse
from .statistics import Stats

if TYPE_CHECKING:
    from .speculator import Speculator

PER_ROW = "prompt_ignore_length"
TAKEN = (
    "attention_mask position_ids cache_position use_cache logits_to_keep synced_gpus return_dict "
    "output_attentions output_hidden_states output_router_logits labels num_items_in_batch"
).split()
"""Arguments that transformers adds to a call, and those that change no token."""


def run(
    spec: Speculator,
    input_ids: Tensor,
    given: dict[str, Any],
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
) -> Tensor:
    """Decodes transformers' left-padded rows.

    Args:
        input_ids: [B, T] prompts.
        given: the call's further arguments: `attention_mask` [B, T] of the prompts (None: no
            padding), and what transformers adds for its own loops.
        logits_processor, stopping_criteria: as transformers prepared them, warpers included.
        config: the generation config of the call.
    Returns:
        [B, T + new] prompts and new tokens, right padded with the pad id.
    Raises:
        InputError: a setting that cannot be honoured, or an input beside the ids, by name.
    """
    _refuse_inputs(given)
    for name in REFUSED:
        refuse(name, getattr(config, name, None))
    if (attention_mask := given.get("attention_mask")) is None:
        attention_mask = torch.ones_like(input_ids)
    # The random stream is the caller's torch generator: a set seed repeats.
    seeds = torch.randint(2**62, (len(input_ids),)).tolist()
    limit = config.max_length - input_ids.shape[1]
    if limit < 1:
        met = f"max_length {config.max_length} leaves no token after {input_ids.shape[1]} of prompt"
        raise InputError(met, "Raise max_length, or give max_new_tokens to model.generate.")
    rows = []
    for index, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        prompt, seen = ids[mask].tolist(), ids.tolist()
        check_ids(spec.target, prompt, f"prompt {index}")
        room = spec.target.max_positions - len(prompt)
        stop = _stop_rule(seen, stopping_criteria, input_ids.device)
        # Processors see the padded row, as they do in transformers.
        rows.append(Row(index, prompt, seeds[index], min(limit, room), set(), seen=seen, stop=stop))
    for batch, processors in _batches(rows, list(logits_processor or ())):
        settings = Settings(do_sample=bool(config.do_sample), logits_processor=processors)
        for _ in decode(spec.target, spec.drafter, batch, settings, spec.plan, Stats()):
            continue
    longest = max(len(row.new) for row in rows)
    pad = _pad_id(config)
    new = [row.new + [pad] * (longest - len(row.new)) for row in rows]
    return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)


def _refuse_inputs(given: dict[str, Any]) -> None:
    """Raises InputError for what the model would read beside the ids: images, embeddings, tokens
    that a cache holds already."""
    for name, value in given.items():
        if name in TAKEN or _is_empty(value):
            continue
        if name == "mm_token_type_ids" and not torch.as_tensor(value).any():
            continue  # of text alone
        raise InputError(
            f"custom_generate does not take {name}",
            "Leave it out: ids and their attention_mask are all that is read.",
        )


def _is_empty(value: Any) -> bool:
    """True for nothing, for a cache without tokens, and for transformers' dict of no images."""
    if hasattr(value, "get_seq_length"):
        return not value.get_seq_length()
    return value is None or (isinstance(value, dict) and not value)


def _pad_id(config: Any) -> int:
    """What transformers writes behind a row that has ended: the pad id, else the first EOS id."""
    ids = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    return int(torch.as_tensor(0 if ids is None else ids).flatten()[0])


def _batches(rows: list[Row], processors: list[Any]) -> Iterator[tuple[list[Row], list[Any]]]:
    """All rows together; or, where a processor holds a value for each row (transformers' penalty
    on a left-padded batch does), each row with its own value."""
    if not any(isinstance(getattr(p, PER_ROW, None), Tensor) for p in processors):
        yield rows, processors
        return
    for row in rows:
        own = [copy.copy(processor) for processor in processors]
        for processor in own:
            if isinstance(value := getattr(processor, PER_ROW, None), Tensor):
                setattr(processor, PER_ROW, value[row.index : row.index + 1])
        yield [row], own


def _stop_rule(prompt: list[int], criteria: Any, device: torch.device) -> Any:
    """transformers' criteria (EOS, stop strings, custom ones) asked after each token."""
    if not criteria:
        return None

    ids = torch.tensor([prompt], device=device)  # and the new ones, each call brings one more

    def stopped(new: list[int]) -> bool:
        nonlocal ids
        ids = torch.cat([ids, ids.new_tensor([new[-1:]])], 1)
        return bool(torch.as_tensor(criteria(ids, None)).all())

    return stopped
