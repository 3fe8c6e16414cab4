"""The secret that servers have in common, and the keys that are derived from it, each for one
purpose."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from kvgraft.segments.store.files import open_regular, private_directory, write_file

CACHE_SECRET = "KVGRAFT_CACHE_SECRET"  # noqa: S105 - the name of an environment variable
SECRET_BYTES = 32
NAME = "secret"  # of its file in a store's directory


def find_secret(directory: Path | None) -> bytes | None:
    """The secret of the environment or else the one in a store's directory, which is made if there
    is none; None if there is neither.

    Raises:
        ValueError: the variable has something else.
        OSError: the directory cannot be used; PermissionError if others may read it.
    """
    if (given := given_secret()) is not None:
        return given
    return None if directory is None else _lasting_secret(directory)


def check_secret(directory: Path | None) -> None:
    """Raise what `find_secret` would of a secret that is there. Makes nothing."""
    if given_secret() is None and directory is not None and (path := directory / NAME).exists():
        _read_secret(path)


def given_secret() -> bytes | None:
    """The secret of the environment; ValueError, without what it has, if that is none."""
    given = os.environ.get(CACHE_SECRET)
    if given is None:
        return None
    try:
        secret = bytes.fromhex(given)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES or len(given) != 2 * SECRET_BYTES:
        raise ValueError(
            f"{CACHE_SECRET} must be {2 * SECRET_BYTES} hexadecimal digits, such as openssl rand "
            "-hex 32"
        )
    return secret


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose, 32 bytes, that tells nothing of the secret or of other keys."""
    return blake3(secret, derive_key_context=f"kvgraft 2026 {purpose}").digest()


def _lasting_secret(directory: Path) -> bytes:
    """The secret that lies in a store's directory, 32 bytes; made by whoever comes first, and there
    only when whole."""
    path = private_directory(directory) / NAME
    if not path.exists():
        temporary = path.with_name(f"secret.{secrets.token_hex(8)}")
        write_file(temporary, secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
        temporary.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    with open_regular(path) as file:
        secret = file.read()
    if len(secret) != SECRET_BYTES:
        raise PermissionError(
            f"{path} has {len(secret)} bytes, not {SECRET_BYTES}: remove it, and nothing that is "
            "stored is found again"
        )
    return secret
