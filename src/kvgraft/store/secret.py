"""The secret that servers share, and keys derived from it, each for one purpose."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from kvgraft.store.files import open_regular, private_directory, write_file

CACHE_SECRET = "KVGRAFT_CACHE_SECRET"  # noqa: S105 - the name of an environment variable
SECRET_BYTES = 32
NAME = "secret"  # file name in a store's directory


def find_secret(directory: Path | None) -> bytes | None:
    """Return the secret of the environment, or the one in a store's directory, which is made if
    necessary.

    Returns None without environment variable and directory.

    Raises:
        ValueError: the variable is invalid.
        OSError: the directory cannot be used; PermissionError if others may read it.
    """
    if (given := given_secret()) is not None:
        return given
    return None if directory is None else _lasting_secret(directory)


def check_secret(directory: Path | None) -> None:
    """Raise the errors of `find_secret` for an existing secret. Makes nothing."""
    if given_secret() is None and directory is not None and (path := directory / NAME).exists():
        _read_secret(path)


def given_secret() -> bytes | None:
    """Return the secret of the environment, or None. ValueError, without the value, if it is
    invalid."""
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
    """Derive a key for one purpose, 32 bytes, which reveals nothing of the secret or of other
    keys."""
    return blake3(secret, derive_key_context=f"kvgraft 2026 {purpose}").digest()


def _lasting_secret(directory: Path) -> bytes:
    """Return the secret in a store's directory, 32 bytes. The first process makes it, and only a
    whole file appears."""
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
