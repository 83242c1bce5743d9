"""transformers' own generate on a second, stock copy of a target, as a way that bench times."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from selfdraft.inference import loading
from selfdraft.inference.random_target import random_model
from selfdraft.inference.target import TargetModel
from selfdraft.scripts.bench_report import Method

LOOKUP_TOKENS = 10  # transformers' usual number of tokens copied from the prompt


def stock_method(name: str, model: Any, eos_ids: set[int], asked: dict[str, Any]) -> Method:
    """transformers' generate on a stock model, with prompt lookup for `hf_lookup`."""
    options = asked | {"pad_token_id": next(iter(eos_ids), 0)}
    options["eos_token_id"] = sorted(eos_ids) or None
    if asked["do_sample"]:
        options |= {"top_k": 0, "top_p": 1.0}
    if name == "hf_lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    ends: list[float] = []  # of the decoder's forwards

    def note_end(*_: Any) -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    model.get_decoder().register_forward_hook(note_end)

    def generate(prompt: list[int]) -> tuple[list[int], float, dict[str, float]]:
        ends.clear()
        ids = torch.tensor([prompt], device=model.device)
        torch.manual_seed(0)
        start = time.perf_counter()
        with torch.inference_mode():
            out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist(), len(ends) - 1, {"prefill": ends[0] - start}

    return Method(name, generate)


def stock_model(target: TargetModel) -> Any:
    """A second copy of the target's weights as transformers loads them, nothing packed."""
    named = target.spec.identity
    if named["random"] is not None:
        model, _ = random_model(named["random"], named["seed"], target.dtype)
    else:
        keys = ("gguf_file", "revision", "adapter")
        options = {key: named[key] for key in keys}
        model, _ = loading.load_pretrained(named["model"], dtype=target.dtype, **options)
    # The checkpoint's own penalties and the like are not ours either.
    model.generation_config = GenerationConfig()
    return model.to(target.device).eval()
