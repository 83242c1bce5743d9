"""What is learned: one file a head kind.  `HEADS` maps each kind's name to its class."""

from importlib import import_module
from pkgutil import iter_modules

from .base import HEADS, Head, HeadConfig, register
from .checkpoint import load_head, save_head
from .draft import Draft, Plan
from .errors import InputError
from .spec import TargetSpec

# A file in this folder that registers a kind is all that a new kind needs.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "HEADS",
    "Draft",
    "Head",
    "HeadConfig",
    "InputError",
    "Plan",
    "TargetSpec",
    "load_head",
    "register",
    "save_head",
]
