"""API keys and admin key of a server, and the check that no shared cache is open to the network."""

import ipaddress
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

ADMIN_KEY = "KVGRAFT_ADMIN_KEY"
SINGLE_TENANT = "KVGRAFT_SINGLE_TENANT"
# variable that vLLM reads if --api-key is not given
API_KEY = "VLLM_API_KEY"
RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


@dataclass(frozen=True)
class Keys:
    """Keys of a server. Without API keys it has one tenant.

    Attributes:
        tenant_names: entries NAME=KEY of `--kvgraft-tenant`; `Keyring` checks them.

    Raises:
        ValueError: a key is empty, given twice, or both an API key and the admin key.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tenant_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the keys."""
        if not all(self.api_keys) or self.admin_key == "":
            raise ValueError("a key must not be empty")
        if len(set(self.api_keys)) < len(self.api_keys):
            raise ValueError("an API key is given twice")
        if self.admin_key in self.api_keys:
            raise ValueError("the admin key must differ from every API key")

    @classmethod
    def of(cls, args: Namespace) -> "Keys":
        """Read the keys from the parsed arguments of `kvgraft serve` or `vllm serve`, and the
        environment.

        Raises:
            ValueError: a key is empty, the keys contradict each other, or tenants would share what
                they must not.
        """
        api_keys = given_keys("--api-key", args.api_key, API_KEY)

        admin_key = getattr(args, "kvgraft_admin_key", None)
        [admin_key] = given_keys(
            "--kvgraft-admin-key", None if admin_key is None else [admin_key], ADMIN_KEY
        ) or [None]

        keys = cls(api_keys, admin_key, tuple(getattr(args, "kvgraft_tenant", None) or ()))
        if len(keys.api_keys) > 1 and os.environ.get(RESPONSES_STORE, "0") != "0":
            raise ValueError(
                f"vLLM's store of responses knows no tenants: unset {RESPONSES_STORE} or keep one "
                "API key"
            )

        declared = (
            getattr(args, "kvgraft_single_tenant", False) or os.environ.get(SINGLE_TENANT) == "1"
        )
        check_exposure(keys.api_keys, host=args.host, uds=args.uds, single_tenant=declared)
        return keys


def check_exposure(
    api_keys: Sequence[str], *, host: str | None, uds: str | None, single_tenant: bool
) -> None:
    """Refuse a server without API keys that listens beyond loopback, unless that was asked for.

    Args:
        host: listening address; None listens on every interface.
        uds: path of a Unix socket, used instead of `host`.
        single_tenant: the operator declared that all callers belong together.

    Raises:
        ValueError: callers would share one cache without anyone having asked for it.
    """
    if api_keys and single_tenant:
        raise ValueError(
            "--kvgraft-single-tenant is for a server without API keys: each API key is a tenant"
        )
    if not (api_keys or single_tenant or uds or _is_loopback(host)):
        raise ValueError(
            "without --api-key all callers share one cache, so the server may listen on loopback "
            "only, got host "
            f"{host or '0.0.0.0'!r}: give API keys, or say --kvgraft-single-tenant"  # noqa: S104
        )


def given_keys(flag: str, keys: Sequence[str] | None, variable: str) -> tuple[str, ...]:
    """Return the keys of a flag, or else of an environment variable.

    Raises:
        ValueError: a key is empty. An empty key does not mean "no key".
    """
    source = flag
    if keys is None and (found := os.environ.get(variable)) is not None:
        keys, source = [found], variable
    if keys is not None and not all(keys):
        raise ValueError(f"{source} is empty: give a key, or do without {source}")
    return tuple(keys or ())


def _is_loopback(host: str | None) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
