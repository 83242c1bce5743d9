"""Our settings in a DeepSpeed config."""

from __future__ import annotations

from accelerate import Accelerator

from ..heads import InputError
from .config import TrainConfig

ADVICE = "Use ZeRO stage 1 or 2 and nothing else, as configs/accelerate/zero2.yaml does."


def compile_nothing() -> None:
    """DeepSpeed would build a shared-memory reduction with the machine's C++ compiler, minutes at
    each first start and never where there is none; gloo's own serves as well."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def set_up(accelerator: Accelerator, config: TrainConfig, autocast: bool) -> None:
    """Hands our settings to DeepSpeed: weights stay float32, accumulation and averaging are ours
    (see step.py).

    Raises:
        InputError: a config that asks for what the loop has not got, or does itself.
    """
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = settings["zero_optimization"]
    asked = [] if zero.get("stage") in (1, 2) else [f"ZeRO stage {zero.get('stage', 0)}"]
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        asked.append("an offloaded optimizer")
    asked += [f"{name} weights" for name in ("bf16", "fp16") if _enabled(settings.get(name))]
    asked += [f"its own {name}" for name in ("optimizer", "scheduler") if name in settings]
    if asked:
        raise InputError(f"the DeepSpeed config asks for {', '.join(asked)}", ADVICE)
    settings |= {
        "train_micro_batch_size_per_gpu": config.schedule.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.clip,
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
    }


def _enabled(section: dict[str, object] | None) -> bool:
    return section is not None and section.get("enabled") not in (None, False, "auto")
