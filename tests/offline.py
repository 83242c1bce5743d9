"""Reads what W&B keeps of an offline run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 2**15
"""W&B writes LevelDB's log format: blocks of fragments, each behind crc32, length and type."""


def records(folder: Path) -> Iterator[Any]:
    """Every record of the one run-*.wandb file in an offline-run-* folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    content, place, parts = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:  # the tail of a block is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        place += HEADER + length
        parts += content[place - length : place]
        if kind in (1, 4):  # whole, or the last fragment
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


class OfflineRun:
    """A run as it stands on disk.

    Attributes:
        id: of the run.
        points: what was logged, in order.
        config: the resolved config.
        axes: step metric by glob or name.
        artifacts: (type, names of its files).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.points, self.config = folder, [], {}
        self.axes: dict[str, str] = {}
        self.artifacts: list[tuple[str, set[str]]] = []
        for record in records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id = record.run.run_id
                self._update(record.run.config)
            elif kind == "config":
                self._update(record.config)
            elif kind == "history":
                items = record.history.item
                point = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                self.points.append(point)
            elif kind == "metric":
                name = record.metric.name or record.metric.glob_name
                self.axes[name] = record.metric.step_metric
            elif kind == "request" and record.request.HasField("log_artifact"):
                self._artifact(record.request.log_artifact.artifact)
            elif kind == "artifact":
                self._artifact(record.artifact)

    def _update(self, config: Any) -> None:
        self.config |= {i.key: json.loads(i.value_json) for i in config.update if i.key}

    def _artifact(self, artifact: Any) -> None:
        files = {entry.path for entry in artifact.manifest.contents}
        self.artifacts.append((artifact.type, files))

    @property
    def steps(self) -> list[int]:
        """On our own axis, of the points of training."""
        return [point["step"] for point in self.points if "loss" in point]

    def tables(self) -> list[dict[str, Any]]:
        """Columns and data of each table, from the files that the points name."""
        paths = [point["samples.path"] for point in self.points if "samples.path" in point]
        return [json.loads((self.folder / "files" / path).read_text()) for path in paths]


def offline_runs(output_dir: Path) -> list[OfflineRun]:
    """All of an output folder, the oldest first."""
    folders = (output_dir / "wandb").glob("offline-run-*")
    return [OfflineRun(f) for f in sorted(folders, key=lambda f: f.stat().st_mtime)]
