"""selfdraft: train light drafting heads on a frozen language model, and generate with them faster
with exactly the same output law."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inference.speculator import Speculator

__version__ = "0.1.0"
__all__ = ["Speculator", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads `Speculator`, and with it transformers, when it is first asked for."""
    if name == "Speculator":
        from .inference.speculator import Speculator

        return Speculator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
