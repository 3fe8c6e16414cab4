"""Checks that policies share for their options."""


def require_share(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value <= 1."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}")


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError unless value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
