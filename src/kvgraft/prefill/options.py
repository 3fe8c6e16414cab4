"""Checks that policies share for their options."""

import math
from collections.abc import Sequence


def require_share(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value <= 1."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}")


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError unless value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def require_amount(name: str, value: float) -> None:
    """Raise ValueError unless value is a finite number of at least 0."""
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def require_layers(name: str, value: int | float) -> None:
    """Raise ValueError unless value is a number of layers (int) or a share of them (float)."""
    if isinstance(value, float):
        require_share(name, value)
    else:
        require_at_least(name, value, 0)


def count_layers(value: int | float, num_layers: int) -> int:
    """A number of layers (int), or a share of all `num_layers` (float), rounded up, as a number of layers."""
    if isinstance(value, float):
        return math.ceil(value * num_layers - 1e-9)
    return min(value, num_layers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
