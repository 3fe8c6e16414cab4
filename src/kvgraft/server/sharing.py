"""Shared namespaces: the admin pins text, and the operator grants API keys the right to graft from
it."""

from argparse import Namespace
from collections.abc import Sequence

from vllm.exceptions import VLLMNotFoundError

from kvgraft.server.flags import SHARE
from kvgraft.server.tenancy import Keyring, Tenant
from kvgraft.vllm.request_fields import NAME

# owner of all shared namespaces; this identity is no SHA-256, so no key has it
SHARED = Tenant("shared", b"shared")
EVERYBODY = "*"
# characters that an error shows of a mistyped key
_SHOWN = 12


class NotGranted(VLLMNotFoundError):
    """Error of a request that names a shared namespace which does not exist or is not granted.

    The message does not reveal which of the two is the case.
    """


class Grants:
    """The shared namespaces and the tenants that may graft from each.

    Args:
        given: entries `NAME=KEY,KEY` or `NAME=*`, in the order in which they are searched. A key is
            given itself or by its tenant's name or label.

    Raises:
        ValueError: a name or a key is invalid, unknown or given twice; the message says what is
            allowed.
    """

    def __init__(self, given: Sequence[str], keyring: Keyring) -> None:
        self._readers: dict[str, tuple[Tenant, ...]] = {}
        for entry in given:
            name, equals, keys = entry.partition("=")
            if not equals or not keys:
                raise ValueError(
                    f"{SHARE} {name!r}: say whom it is shared with, as NAME=KEY,KEY or "
                    f"NAME={EVERYBODY}"
                )

            NAME.check(f"{SHARE}: a name", name)
            if name in self._readers:
                raise ValueError(f"{SHARE} {name!r} is given twice: name all of its keys in one")
            self._readers[name] = _tenants(name, keys, keyring.tenants)

        if self._readers and not keyring.has_admin:
            raise ValueError(
                f"{SHARE} {', '.join(self._readers)}: only an admin key can fill it, and there is "
                "none"
            )

    @classmethod
    def of(cls, args: Namespace, keyring: Keyring) -> "Grants":
        """Return the grants in the parsed arguments of a server."""
        return cls(getattr(args, "kvgraft_share", None) or (), keyring)

    @property
    def names(self) -> tuple[str, ...]:
        """All shared namespaces."""
        return tuple(self._readers)

    @property
    def as_arguments(self) -> list[str]:
        """The entries with labels in place of keys, so that they may be shown."""
        return [
            f"{name}={','.join(tenant.label for tenant in readers)}"
            for name, readers in self._readers.items()
        ]

    def names_for(self, tenant: Tenant, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the shared namespaces from which a request of this tenant grafts.

        Args:
            wanted: names that the request asks for; None: all that are granted.

        Raises:
            NotGranted: a requested namespace is not granted.
        """
        granted = tuple(name for name, readers in self._readers.items() if tenant in readers)
        for name in wanted or ():
            if name not in granted:
                raise NotGranted(
                    f"shared: no namespace {name!r} for this key: it has "
                    f"{', '.join(granted) or 'none'}"
                )
        return granted if wanted is None else tuple(wanted)


def _tenants(name: str, keys: str, known: Sequence[Tenant]) -> tuple[Tenant, ...]:
    """Return the tenants of the keys that one namespace is granted to.

    Raises:
        ValueError: a key is unknown or given twice.
    """
    if keys == EVERYBODY:
        return tuple(known)

    names = ", ".join(tenant.name for tenant in known)
    found: list[Tenant] = []
    for key in keys.split(","):
        named = [
            tenant
            for tenant in known
            if key in (tenant.name, tenant.label) or Tenant.of(key) == tenant
        ]
        if len(named) != 1:
            shown = repr(key[:_SHOWN] + "..." if len(key) > _SHOWN else key)
            raise ValueError(
                f"{SHARE} {name}: no API key {shown}: allowed are {EVERYBODY}, the keys, or {names}"
            )
        if named[0] in found:
            raise ValueError(f"{SHARE} {name}: the API key {named[0].name} is given twice")
        found += named
    return tuple(found)
