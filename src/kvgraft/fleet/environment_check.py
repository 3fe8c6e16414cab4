"""Check that all machines of a fleet have the same environment variables."""

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EnvironmentCheck:
    """Salted digests of environment variables on the machine that starts the fleet.

    A digest reveals only whether another machine has the same value.
    """

    salt: bytes = field(repr=False)
    digests: dict[str, bytes] = field(repr=False)

    @classmethod
    def here(cls, names: Iterable[str]) -> "EnvironmentCheck":
        """Return the digests on this machine; a variable that is not set must not be set elsewhere,
        either."""
        salt = secrets.token_bytes(32)
        return cls(salt, {name: _digest(salt, name) for name in names})

    def check(self) -> None:
        """Compare the digests with this machine's environment.

        Raises:
            ValueError: variables differ; the message names them.
        """
        if others := [
            name for name, digest in self.digests.items() if _digest(self.salt, name) != digest
        ]:
            raise ValueError(
                f"{', '.join(others)}: not the same here as where the fleet was started: all nodes "
                "need the same value"
            )


def _digest(salt: bytes, name: str) -> bytes:
    """Return the salted digest of a variable's value; a variable that is not set has its own
    digest."""
    value = os.environ.get(name)
    return hashlib.blake2b(b"" if value is None else b"=" + value.encode(), key=salt).digest()
