"""Tenants, identified by API keys, and the cache keys that keep tenants apart."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvgraft.server.flags import TENANT
from kvgraft.server.keys import Keys
from kvgraft.store.secret import SECRET_BYTES, derive, find_secret
from kvgraft.vllm.options import labelled
from kvgraft.vllm.request_fields import NAME

# hexadecimal digits
LABEL_LENGTH = 8
# labels of what has no API key
RESERVED = ("local", "shared")


@dataclass(frozen=True)
class Tenant:
    """One owner of cached content.

    Attributes:
        label: the first digits of the SHA-256 of its key. Cache keys depend on it.
        identity: SHA-256 of its key.
        given_name: the operator's name for it, or empty.
    """

    label: str
    identity: bytes = field(repr=False)
    given_name: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Return the name that people see: the operator's, or else the label."""
        return self.given_name or self.label

    @classmethod
    def of(cls, key: str) -> "Tenant":
        """Return the tenant with this API key."""
        identity = hashlib.sha256(key.encode()).digest()
        return cls(identity.hex()[:LABEL_LENGTH], identity)


# every caller of a server without API keys
LOCAL = Tenant("local", b"")


@dataclass(frozen=True)
class Principal:
    """The caller: the tenant whose cache is used, and whether it gave the admin key."""

    tenant: Tenant
    is_admin: bool = False


class Keyring:
    """The keys of a server.

    Raises:
        ValueError: two API keys have the same label, or a name for a tenant cannot be used.
    """

    def __init__(self, keys: Keys) -> None:
        self.tenants = tuple(Tenant.of(key) for key in keys.api_keys) or (LOCAL,)
        self.has_keys = bool(keys.api_keys)
        self.has_admin = keys.admin_key is not None

        if len({tenant.label for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("two API keys have the same label: replace one of them")
        self.tenants = _named(self.tenants, keys)
        self._admin = Tenant.of(keys.admin_key) if keys.admin_key is not None else None

    @property
    def has_one_tenant(self) -> bool:
        """Return whether all content in the engine belongs to the same tenant."""
        return len(self.tenants) == 1

    @property
    def names_as_arguments(self) -> list[str]:
        """The entries of `--kvgraft-tenant` with labels in place of keys, so that they may be
        shown."""
        return [f"{one.given_name}={one.label}" for one in self.tenants if one.given_name]

    def principal(self, key: str | None) -> Principal | None:
        """Return the caller that gives this key.

        Args:
            key: None if the request has no key.

        Returns:
            None if the server needs a key and this one is missing or unknown.
        """
        shown = hashlib.sha256((key or "").encode()).digest()
        if self._admin is not None and hmac.compare_digest(shown, self._admin.identity):
            return Principal(self._admin if self.has_keys else LOCAL, is_admin=True)
        if not self.has_keys:
            return Principal(LOCAL)

        holder = None
        # compare with every key, so that the time reveals nothing about them
        for tenant in self.tenants:
            if hmac.compare_digest(shown, tenant.identity):
                holder = Principal(tenant)
        return holder

    def tenant(self, name: str | None) -> Tenant:
        """Return the tenant with this name or label; None means the only tenant.

        Raises:
            ValueError: there is no such tenant, or several tenants exist and none is named.
        """
        known = ", ".join(tenant.name for tenant in self.tenants)
        if name is None and len(self.tenants) > 1:
            raise ValueError(f"name a tenant: {known}")
        for tenant in self.tenants:
            if name in (None, tenant.name, tenant.label):
                return tenant
        raise ValueError(f"no tenant {name!r}: there are {known}")


def _named(tenants: Sequence[Tenant], keys: Keys) -> tuple[Tenant, ...]:
    """Return the tenants with the names of `--kvgraft-tenant`.

    Raises:
        ValueError: a name or key is invalid, unknown or given twice. The message shows no key.
    """
    labels = [tenant.label for tenant in tenants]
    names: dict[str, str] = {}
    for entry in keys.tenant_names:
        name, equals, key = entry.partition("=")
        # a key could stand in the place of a name, so it is not shown
        if not (equals and key) or name in (*keys.api_keys, keys.admin_key):
            raise ValueError(f"{TENANT}: give NAME=KEY, and no key as the name")
        NAME.check(f"{TENANT}: a name", name)
        if name in (*names.values(), *labels, *RESERVED):
            raise ValueError(f"{TENANT} {name}: this is already the name or label of a tenant")

        found = [one.label for one in tenants if key == one.label or Tenant.of(key) == one]
        if not found:
            raise ValueError(
                f"{TENANT} {name}: no such API key: give a key, or one of {', '.join(labels)}"
            )
        if found[0] in names:
            raise ValueError(f"{TENANT} {name}: the tenant {found[0]} already has a name")
        names[found[0]] = name
    return tuple(replace(one, given_name=names.get(one.label, "")) for one in tenants)


class Salts:
    """Cache keys of one server process, which nobody can guess.

    The secret comes from `KVGRAFT_CACHE_SECRET` if this is set, else from the store's directory.
    Without both, the cache keys are valid in this process only.

    Args:
        directory: the store's directory, or None. Servers that use the same directory have the same
            keys.

    Raises:
        ValueError: the variable does not hold a secret.
        OSError: the directory cannot be used; PermissionError if other users may read it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._secret = derive(
            find_secret(directory) or secrets.token_bytes(SECRET_BYTES), "cache keys"
        )

    def of(self, tenant: Tenant, namespace: str = "", cache_salt: str | None = None) -> str:
        """Return the cache key for a tenant's content, narrowed by namespace and the client's salt.

        Returns:
            64 hexadecimal digits, then a label that operators may see: the tenant's label, the
            namespace, and whether a salt narrows it.
        """
        parts = (self._secret, tenant.identity, namespace.encode(), (cache_salt or "").encode())
        key = hashlib.sha256(
            b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        ).hexdigest()

        place = f"{tenant.label}/{namespace}" if namespace else tenant.label
        return labelled(key, f"{place}+salt" if cache_salt else place)

    def nobody(self) -> str:
        """Return a random cache key for a request without an owner, so that it shares nothing."""
        return secrets.token_hex(32)


def shown_key(authorization: str | None, *, basic: bool) -> str | None:
    """Return the key in an Authorization header, or None.

    Args:
        basic: whether the password of basic authentication, which browsers ask for, is accepted in
            addition to a bearer token.
    """
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() != "basic" or not basic:
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
