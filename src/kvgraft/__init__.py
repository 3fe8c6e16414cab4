"""KVGraft: reuse the KV cache of any text a model has already read, at any position, in any
order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraft.core.prompt import Segment
    from kvgraft.engine.engine import Engine
    from kvgraft.engine.request import Event, Report, Request, RequestError, Result
    from kvgraft.engine.sampling import SamplingParams
    from kvgraft.prefill.context import Policy

__version__ = "0.1.0"
_MODULES = {
    "kvgraft.engine.engine": ("Engine",),
    "kvgraft.engine.request": ("Event", "Report", "Request", "RequestError", "Result"),
    "kvgraft.engine.sampling": ("SamplingParams",),
    "kvgraft.prefill.context": ("Policy",),
    "kvgraft.core.prompt": ("Segment",),
}

__all__ = [
    "Engine",
    "Event",
    "Policy",
    "Report",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "Segment",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Importing torch takes seconds, and neither `--help` nor
    plugins need it.
    """
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
