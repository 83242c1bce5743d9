"""YAML in which 2e-5 is a number, 1:30, 010 and 2026-11-30 are text and equal keys are noticed;
overrides."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from .ranks import say

INT, FLOAT, DATE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 2e-5 as text, since it wants a dot, 1:30 as 90 and 010 as 8; it keeps the last
    of equal keys, and lets a value hold itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []
        self.deep_construct = True  # at once, so that a value that holds itself is an error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A dict; keys met twice are noted in `duplicates`."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                self.duplicates.append(f"{key.value}: this key is given twice (line {line})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A float, or an int where it is written as a whole number in the form 1e2."""
        value = self.construct_yaml_float(node)
        whole = "." not in node.value and math.isfinite(value) and value.is_integer()
        return int(value) if whole else value


_DIGITS = r"(0|[1-9][\d_]*)"
_FORMS = {
    INT: rf"[-+]?({_DIGITS}|0x[\da-fA-F_]+|0b[01_]+)$",
    FLOAT: rf"[-+]?({_DIGITS}(\.[\d_]*)?[eE][-+]?\d+|{_DIGITS}\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?"
    r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag not in (INT, FLOAT, DATE)]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form in _FORMS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_form), list("-+.0123456789"))
_Loader.add_constructor(FLOAT, _Loader.construct_number)


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of one YAML document, and what is wrong with it."""
    try:
        loader = _Loader(text)
        return loader.get_single_data(), loader.duplicates
    # A tag such as !!bool on another value is met as whatever its constructor stumbles over.
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        return None, [f"not YAML: {' '.join(str(error).split())}"]


def apply_overrides(raw: dict[str, Any], overrides: list[str]) -> list[str]:
    """Writes `a.b=value` overrides into `raw`; returns what is wrong with them.

    `head.kind=NAME` resets the section `head` and prints the keys of the file that this drops.
    """
    problems: list[str] = []
    parsed: list[tuple[list[str], Any]] = []
    for text in overrides:
        dotted, equals, value_text = text.partition("=")
        value, faults = parse_yaml(value_text)
        if not equals or not all(dotted.split(".")):
            faults = ["write it as key=value, with dots for sections"]
        problems += [f"override {text!r}: {fault}" for fault in faults]
        parsed += [] if faults else [(dotted.split("."), value)]
    # The kind comes first: it resets the section that other overrides then write to.
    for path, value in sorted(parsed, key=lambda item: item[0] != ["head", "kind"]):
        if path == ["head", "kind"]:
            _reset_head(raw, value)
        fault = _write(raw, path, value)
        problems += [fault] if fault else []
    return problems


def _reset_head(raw: dict[str, Any], kind: Any) -> None:
    head = raw.get("head")
    dropped = [key for key in head if key != "kind"] if isinstance(head, dict) else []
    if dropped:
        say(f"head.kind={kind} starts from its defaults; dropped from the file: {dropped}")
    raw["head"] = {}


def _write(raw: dict[str, Any], path: list[str], value: Any) -> str | None:
    section = raw
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            return f"{'.'.join(path)}: {'.'.join(path[:depth])} is no section, override it whole"
    section[path[-1]] = value
    return None
