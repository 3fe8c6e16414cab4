"""How many examples Hypothesis tries: the same ones in every run, more of them in the profile
`full`."""

from typing import Any

from hypothesis import HealthCheck, settings

MORE = 5  # times as many examples in `full`
DEFAULT = 100


def register() -> None:
    """The profiles `fast`, which is taken unless another is asked for, and `full`."""
    settings.register_profile(
        "fast",
        derandomize=True,
        deadline=None,  # a busy machine makes no test wrong
        suppress_health_check=list(HealthCheck),
        max_examples=DEFAULT,
    )
    settings.register_profile("full", settings.get_profile("fast"), max_examples=MORE * DEFAULT)
    settings.load_profile("fast")


def examples(number: int, **more: Any) -> settings:
    """For a test that is to try so many, and as many times more in `full` as others."""
    return settings(max_examples=number * settings().max_examples // DEFAULT, **more)
