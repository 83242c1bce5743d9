"""Where an earlier run stands: whether it is finished, on which target, and its best head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..heads import InputError
from ..heads.checkpoint import DESCRIPTION, WEIGHTS, read_description, sha256
from .checkpoint import Checkpoint
from .config import TrainConfig
from .limits import Limits, same_rows
from .ranks import say


def finished(found: Checkpoint, config: TrainConfig) -> bool:
    """Has the run in output_dir met its limit?  Then says so.

    Raises:
        InputError: the checkpoint is another run's, and leaves none of its steps to output_dir.
    """
    limit = Limits(config.schedule, found.state).reached(found.step)
    if limit is None:
        return False
    if not found.lies_in(config.output_dir):
        raise InputError(
            f"{found.folder} has met its limit, {limit}: there is no step left for "
            f"{config.output_dir}",
            "Raise the limit, or take the head that is there.",
        )
    if found.state["target_config"] != named(config):
        return False  # said once the target is loaded
    say(f"{config.output_dir} is finished: {found.step} steps are done, {limit}; raise it to go on")
    return True


def named(config: TrainConfig) -> dict[str, Any]:
    """How the target is named: enough to tell without loading it that it is the same one."""
    how = {"device", "device_map"}
    return config.target.model_dump(mode="json", exclude=how) | {"seed": config.seed}


def best_head(
    output_dir: str | Path, resumed: Checkpoint | None = None, judged_by: str | None = None
) -> dict[str, Any]:
    """head.json of the best head so far, which output_dir holds; empty where there is none, where a
    kill has torn it from its weights, or where it is nothing to compare with.

    Args:
        resumed: where the run goes on: steps behind it are taken again, and so judged again.
        judged_by: see `limits.judged_by`; a head that was judged by other rows is no measure.
    """
    output = Path(output_dir)
    if not ((output / DESCRIPTION).is_file() and (output / WEIGHTS).is_file()):
        return {}
    found = read_description(output)
    undone = resumed is not None and (found.get("step") or 0) > resumed.step
    whole = found["sha256"] == sha256(output / WEIGHTS)
    return found if whole and not undone and same_rows(found, judged_by) else {}
