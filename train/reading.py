"""From a file to rows: JSON lines, a JSON array, or Parquet.

An array is cut into its elements by their brackets before any of them is parsed, so that it is read
in constant memory, a damaged element costs that element alone, and a file that was cut off is told
from a damaged one.  Lines and elements are parsed one by one: no column has a type.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..heads.errors import InputError

BLOCK = 2**20
"""Bytes read at once."""
CUT_OFF = "cut off by the end of the file"
SPACE = b" \t\r\n"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+[\[\]{}]", re.DOTALL)
_BRACKET_OR_COMMA = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+[\[\]{},]", re.DOTALL)
_WHOLE = re.compile(rb'(?:[^"]++|' + _STRING + rb")*+", re.DOTALL)
"""Up to the next mark outside of strings; and up to a string without an end."""


SHOWN = 5
"""Reasons told at most: some hold a row's own words."""


class RowError(ValueError):
    """A row that cannot be used; the text is the reason that it is counted under."""


def counted(reasons: Mapping[str, int]) -> str:
    """The commonest reasons and how often each was met, in one line."""
    often = sorted(reasons.items(), key=lambda item: -item[1])
    parts = [f"{count} × {reason}" for reason, count in often[:SHOWN]]
    if rest := often[SHOWN:]:
        parts.append(f"{sum(count for _, count in rest)} × {len(rest)} other reasons")
    return "; ".join(parts)


def read_rows(
    path: Path, skipped: Counter[str], *, keep_whole: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers (of the line or the element, from 1) and objects of a file; what is no object is
    counted in `skipped`.

    Args:
        keep_whole: use the whole elements of an array that is cut off.
    Raises:
        InputError: no such file, an empty one, a damaged Parquet file, an array that is cut off.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist", "Name an existing JSON, JSONL or Parquet file.")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty", "It wants one JSON object a line.")
    if path.suffix == ".parquet":
        yield from _parquet(path, skipped)
        return
    with path.open("rb") as file:
        array = is_array(file)
        pieces = _elements(file, path, skipped, keep_whole) if array else file
        for number, piece in enumerate(pieces, start=1):
            try:
                yield number, _object(piece)
            except RowError as error:
                skipped[str(error)] += 1


def is_array(file: BinaryIO) -> bool:
    """Does the first mark open an array?  Leaves the file at its begin."""
    start = file.read(BLOCK).removeprefix(b"\xef\xbb\xbf").lstrip(SPACE)
    file.seek(0)
    return start.startswith(b"[")


def check_end(path: Path, keep_whole: bool) -> None:
    """Tells early of an array that is cut off: one that does not end with its bracket is read
    through.

    Raises:
        InputError: as `read_rows`.
    """
    if keep_whole or path.suffix == ".parquet":
        return
    with path.open("rb") as file:
        if not is_array(file):
            return
        file.seek(max(0, path.stat().st_size - 64))
        if file.read().rstrip(SPACE).endswith(b"]"):
            return
        file.seek(0)
        for _ in _elements(file, path, Counter(), keep_whole):
            continue


def whole_lines(path: Path) -> int:
    """Removes a last line that a kill has torn; returns the number of lines left."""
    with path.open("rb+") as file:
        kept = lines = 0
        for line in file:
            if line.endswith(b"\n"):
                kept, lines = kept + len(line), lines + 1
        file.truncate(kept)
    return lines


def _object(piece: bytes) -> dict[str, Any]:
    try:
        row = json.loads(piece.removeprefix(b"\xef\xbb\xbf").decode())
        if b"\\u" in piece:  # half of a surrogate pair is JSON, but no text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError:
        raise RowError("not Unicode text") from None
    except (ValueError, RecursionError):
        raise RowError("not JSON" if piece.strip() else "an empty line") from None
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    return row


def _elements(
    file: BinaryIO, path: Path, skipped: Counter[str], keep_whole: bool
) -> Iterator[bytes]:
    """The elements of an array, unparsed."""
    buffer, base = file.read(BLOCK), 0  # `base`: where in the file the buffer begins
    begin = place = buffer.index(b"[") + 1
    depth, whole = 1, 0
    while True:
        found = (_BRACKET_OR_COMMA if depth == 1 else _BRACKET).match(buffer, place)
        if found is None:  # the rest of the buffer has no mark, or a string without its end
            more = file.read(max(BLOCK, len(buffer) - begin))
            if not more:
                break
            base, place = base + begin, place - begin
            buffer, begin = buffer[begin:] + more, 0
            continue
        place = found.end()
        mark = buffer[place - 1 : place]
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > 1 or (depth == 1 and mark != b","):
            continue
        element = buffer[begin : place - 1]
        if depth == 1 or element.strip():
            whole += 1
            yield element
        begin = place
        if not depth:
            _check_rest(buffer[place:] + file.read(BLOCK), path, base + place)
            return
    rest, closed = buffer[begin:].lstrip(SPACE), _WHOLE.fullmatch(buffer, place)
    if rest and closed and depth == 1:  # cut behind the brace of a row
        whole, rest = whole + 1, b""
        yield buffer[begin:]
    if not keep_whole:
        met = "before its array does" if closed else "in the middle of a string"
        if rest:
            met += f"; row {whole + 1}, which begins at byte {base + len(buffer) - len(rest)}, is "
            met += "not whole"
        raise InputError(
            f"{path} is cut off: it ends at byte {base + len(buffer)}, {met}",
            f"Get it anew, or set data.on_truncated=keep_whole to use its {whole} whole rows.",
        )
    if rest:
        skipped[CUT_OFF] += 1


def _check_rest(rest: bytes, path: Path, where: int) -> None:
    if rest.strip(SPACE):
        raise InputError(
            f"{path}: the JSON array ends at byte {where}, and more follows",
            "Give one array, or one object a line.",
        )


def _parquet(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            # Times, of which Python lacks some, are in no row that is learned from.
            types = enumerate(file.schema_arrow.types)
            columns = [place for place, kind in types if not pyarrow.types.is_temporal(kind)]
            for batch in file.iter_batches(batch_size=256):
                for row in _arrow_rows(batch.select(columns)):
                    number += 1
                    if isinstance(row, RowError):
                        skipped[str(row)] += 1
                    else:
                        yield number, without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is no whole Parquet file: {reason}", "Get it anew.") from None


def _arrow_rows(batch: Any) -> list[dict[str, Any] | RowError]:
    """Rows of an Arrow batch, or why Python cannot have one."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, LookupError) as error:
        if batch.num_rows == 1:
            text = isinstance(error, UnicodeError)
            return [RowError("not Unicode text" if text else "a value that Python has not got")]
        return [row for i in range(batch.num_rows) for row in _arrow_rows(batch.slice(i, 1))]


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct the keys of all rows: what a row does not have is null there."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
