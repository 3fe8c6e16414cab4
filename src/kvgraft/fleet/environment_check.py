"""What the machines of a fleet must have alike."""

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EnvironmentCheck:
    """Environment variables as they are where a fleet is started: their digests, which tell nothing
    but whether another machine has the same value."""

    salt: bytes = field(repr=False)
    digests: dict[str, bytes] = field(repr=False)

    @classmethod
    def here(cls, names: Iterable[str]) -> "EnvironmentCheck":
        """As they are here; one that is not set must not be set elsewhere, either."""
        salt = secrets.token_bytes(32)
        return cls(salt, {name: _digest(salt, name) for name in names})

    def check(self) -> None:
        """Raise ValueError, with their names, if some differ here."""
        if others := [
            name for name, digest in self.digests.items() if _digest(self.salt, name) != digest
        ]:
            raise ValueError(
                f"{', '.join(others)}: not the same here as where the fleet was started: all nodes "
                "need the same value"
            )


def _digest(salt: bytes, name: str) -> bytes:
    value = os.environ.get(name)
    return hashlib.blake2b(b"" if value is None else b"=" + value.encode(), key=salt).digest()
