"""Models by name, downloaded or converted from GGUF files, in the user's cache directory."""

from kvgraft.models.find import BUNDLED, LABORATORY, bundled_model, find_model, is_name
from kvgraft.models.get import get_model
from kvgraft.models.known import KNOWN, KnownModel
from kvgraft.models.named import NamedModel, named_models

__all__ = [
    "BUNDLED",
    "KNOWN",
    "LABORATORY",
    "KnownModel",
    "NamedModel",
    "bundled_model",
    "find_model",
    "get_model",
    "is_name",
    "named_models",
]
