"""Targets that need no files: a config initialised from a seed, and a byte tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ..heads.errors import InputError, nearest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_model(fields: dict[str, Any], seed: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """A target of `fields`, a transformers config, initialised from `seed`, and a byte tokenizer.

    Raises:
        InputError: no model_type, or fields that make no model.
    """
    if "model_type" not in fields:
        raise InputError("target.random lacks model_type", "Add e.g. model_type: llama.")
    tokenizer = byte_tokenizer()
    # The ids of a family's own tokenizer would end texts at an ordinary byte here.
    fields = {"vocab_size": 320, "eos_token_id": tokenizer.eos_token_id, **fields}
    try:
        config = AutoConfig.for_model(**fields)
        _check_fields(config, fields)
        # The caller's random state is left as it was.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except InputError:
        raise
    except Exception as error:  # whatever a family makes of foreign fields
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"target.random makes no model: {reason}", "Fix the transformers config given there."
        ) from None
    return model, tokenizer


def _check_fields(config: Any, fields: dict[str, Any]) -> None:
    """Raises InputError for fields that the family would keep and never read."""
    known = AutoConfig.for_model(config.model_type).to_dict()
    unread = sorted(fields.keys() & config.to_dict().keys() - known.keys())
    if unread:
        raise InputError(
            f"target.random has {', '.join(map(repr, unread))}, which {config.model_type} lacks",
            nearest(unread[0], known),
        )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte and three ChatML marks: needs no file and covers every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
