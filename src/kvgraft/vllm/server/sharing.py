"""Shared namespaces: text that the admin pins, and that the API keys graft from to which the
operator grants it."""

from argparse import Namespace
from collections.abc import Sequence

from vllm.exceptions import VLLMNotFoundError

from kvgraft.vllm.options import check_name
from kvgraft.vllm.server.flags import SHARE
from kvgraft.vllm.server.tenancy import Keyring, Tenant

# theirs are all shared namespaces; no key has this identity, which is no SHA-256
SHARED = Tenant("shared", b"shared")
EVERYBODY = "*"
_SHOWN = 12  # characters of what may be a mistyped key


class NotGranted(VLLMNotFoundError):
    """A request names a shared namespace that its key may not read, or that does not exist: it
    cannot tell which."""


class Grants:
    """Who may graft from which shared namespaces.

    Args:
        given: `NAME=KEY,KEY` or `NAME=*`, in the order in which they are searched. A key is named
            by its tenant's label or given itself.

    Raises:
        ValueError: a name or a key that is none, or is given twice; the message says what is
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
            check_name(f"{SHARE}: a name", name)
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
        """From the parsed arguments of a server."""
        return cls(getattr(args, "kvgraft_share", None) or (), keyring)

    @property
    def names(self) -> tuple[str, ...]:
        """All shared namespaces."""
        return tuple(self._readers)

    @property
    def as_arguments(self) -> list[str]:
        """What was given, with labels for the keys: it may be shown."""
        return [
            f"{name}={','.join(tenant.label for tenant in readers)}"
            for name, readers in self._readers.items()
        ]

    def names_for(self, tenant: Tenant, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
        """The shared namespaces that a request of this tenant grafts from: those that it wants;
        None: all it may.

        Raises:
            NotGranted: it may not have one of those that it wants.
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
    """The tenants of the keys of one namespace."""
    if keys == EVERYBODY:
        return tuple(known)
    labels = ", ".join(tenant.label for tenant in known)
    found: list[Tenant] = []
    for key in keys.split(","):
        named = [tenant for tenant in known if key == tenant.label or Tenant.of(key) == tenant]
        if len(named) != 1:
            shown = repr(key[:_SHOWN] + "..." if len(key) > _SHOWN else key)
            raise ValueError(
                f"{SHARE} {name}: no API key {shown}: allowed are {EVERYBODY}, the keys, or "
                f"{labels}"
            )
        if named[0] in found:
            raise ValueError(f"{SHARE} {name}: the API key {named[0].label} is given twice")
        found += named
    return tuple(found)
