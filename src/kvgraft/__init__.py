"""KVGraft: reuse the KV cache of any text a model has already read, at any position, in any order."""

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Event, Report, Request, RequestError, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill.context import Policy
from kvgraft.segments.prompt import Segment

__version__ = "0.1.0"

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
