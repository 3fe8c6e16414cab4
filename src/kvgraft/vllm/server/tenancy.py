"""Whose request it is: tenants from keys, and the cache key that keeps tenants apart."""

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from kvgraft.segments.store.secret import SECRET_BYTES, derive, find_secret
from kvgraft.vllm.options import labelled
from kvgraft.vllm.server.keys import Keys

LABEL_LENGTH = 8  # hexadecimal digits


@dataclass(frozen=True)
class Tenant:
    """One owner of cached content.

    Attributes:
        label: what may be shown of it: the first digits of the SHA-256 of its key.
        identity: the SHA-256 of its key.
    """

    label: str
    identity: bytes = field(repr=False)

    @classmethod
    def of(cls, key: str) -> "Tenant":
        """The tenant with this API key."""
        identity = hashlib.sha256(key.encode()).digest()
        return cls(identity.hex()[:LABEL_LENGTH], identity)


LOCAL = Tenant("local", b"")  # everybody who reaches a server without API keys


@dataclass(frozen=True)
class Principal:
    """Who calls: the tenant whose cache is used, and whether the admin key was shown."""

    tenant: Tenant
    is_admin: bool = False


class Keyring:
    """The keys of a server.

    Raises:
        ValueError: two API keys have the same label.
    """

    def __init__(self, keys: Keys) -> None:
        self.tenants = tuple(Tenant.of(key) for key in keys.api_keys) or (LOCAL,)
        self.has_keys = bool(keys.api_keys)
        self.has_admin = keys.admin_key is not None
        if len({tenant.label for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("two API keys have the same label: replace one of them")
        self._admin = Tenant.of(keys.admin_key) if keys.admin_key is not None else None

    @property
    def has_one_tenant(self) -> bool:
        """Whether whatever is in the engine is this tenant's."""
        return len(self.tenants) == 1

    def principal(self, key: str | None) -> Principal | None:
        """Who shows `key` (None: no key); None if a key is needed and this is none."""
        shown = hashlib.sha256((key or "").encode()).digest()
        if self._admin is not None and hmac.compare_digest(shown, self._admin.identity):
            return Principal(self._admin if self.has_keys else LOCAL, is_admin=True)
        if not self.has_keys:
            return Principal(LOCAL)
        holder = None
        for tenant in self.tenants:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(shown, tenant.identity):
                holder = Principal(tenant)
        return holder

    def tenant(self, label: str | None) -> Tenant:
        """The tenant with this label; None means the only one.

        Raises:
            ValueError: there is no such tenant, or several and none is named.
        """
        known = ", ".join(tenant.label for tenant in self.tenants)
        if label is None and len(self.tenants) > 1:
            raise ValueError(f"name a tenant: {known}")
        for tenant in self.tenants:
            if label in (None, tenant.label):
                return tenant
        raise ValueError(f"no tenant {label!r}: there are {known}")


class Salts:
    """The cache keys of one server process, which nobody can guess.

    Args:
        directory: of a store: the same keys then hold wherever it is used. None: they mean nothing
            to another process, unless `KVGRAFT_CACHE_SECRET` is set, which comes first in any case.

    Raises:
        ValueError: the variable has no secret.
        OSError: the directory cannot be used; PermissionError if others may read it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._secret = derive(
            find_secret(directory) or secrets.token_bytes(SECRET_BYTES), "cache keys"
        )

    def of(self, tenant: Tenant, namespace: str = "", cache_salt: str | None = None) -> str:
        """The key under which a tenant's content is cached, narrowed by what the client chose, 64
        hex digits; behind it what operators are shown of it: the tenant's label, the namespace, and
        whether a salt narrows it further."""
        parts = (self._secret, tenant.identity, namespace.encode(), (cache_salt or "").encode())
        key = hashlib.sha256(
            b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        ).hexdigest()
        place = f"{tenant.label}/{namespace}" if namespace else tenant.label
        return labelled(key, f"{place}+salt" if cache_salt else place)

    def nobody(self) -> str:
        """A key that is never given out again, for a request without an owner: it shares
        nothing."""
        return secrets.token_hex(32)


def shown_key(authorization: str | None, *, basic: bool) -> str | None:
    """The key in an Authorization header: a bearer token or, where `basic` allows it, the password
    that a browser asked for. None if there is none."""
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() != "basic" or not basic:
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
