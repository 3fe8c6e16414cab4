"""Whether a machine has what the others have."""

import pytest

from kvgraft.fleet.application import variables_to_compare
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.options import FleetOptions

NAMES = ("KVGRAFT_ADMIN_KEY", "VLLM_API_KEY", "KVGRAFT_CACHE_SECRET")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("here", "there"), [("a", "b"), ("a", None), (None, "a"), (None, "")])
def test_what_differs_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, here: str | None, there: str | None
):
    """Paired: the same value."""

    def put(value: str | None) -> None:
        monkeypatch.delenv(NAMES[0], raising=False)
        if value is not None:
            monkeypatch.setenv(NAMES[0], value)

    put(here)
    alike = EnvironmentCheck.here(NAMES)
    alike.check()
    put(there)
    with pytest.raises(ValueError, match="KVGRAFT_ADMIN_KEY: not the same") as told:
        alike.check()
    assert NAMES[1] not in str(told.value)
    assert b"a" not in alike.digests.values()


def test_what_a_flag_says_no_variable_says(monkeypatch: pytest.MonkeyPatch):
    assert variables_to_compare(FleetOptions()) == ["VLLM_API_KEY", "KVGRAFT_ADMIN_KEY"]
    assert variables_to_compare(FleetOptions(arguments=["--api-key", "k"])) == ["KVGRAFT_ADMIN_KEY"]
    # where it is not, that is said nowhere else, either
    monkeypatch.setenv("KVGRAFT_CACHE_SECRET", "ab" * 32)
    assert variables_to_compare(FleetOptions()) == [NAMES[1], NAMES[0], NAMES[2]]
