"""Grants of shared namespaces for one request, from the API server to the engine."""

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvgraft.vllm.options import CONTROL_TOKEN

# key in kv_transfer_params; clients cannot send it
GRANTED = "kvgraft_granted"
_FIELDS = {"salts", "proof"}


def granted_params(cache_salt: str, salts: Sequence[str]) -> dict[str, Any]:
    """Return a grant with a proof that the API server made it.

    Args:
        cache_salt: cache key of the request.
        salts: cache keys of the namespaces that it may read.
    """
    return {"salts": list(salts), "proof": _proof(cache_salt, salts)}


def granted_salts(given: Any, cache_salt: str) -> tuple[str, ...]:
    """Return the cache keys of the namespaces that a request may graft from, besides its own.

    Args:
        given: result of `granted_params`; None for no grant.
        cache_salt: cache key of the request.

    Raises:
        ValueError: the API server did not make this grant, or made it for another cache key.
    """
    if given is None:
        return ()

    if (
        not isinstance(given, Mapping)
        or given.keys() != _FIELDS
        or not isinstance(given["salts"], list)
    ):
        raise ValueError(f"{GRANTED} must have {', '.join(sorted(_FIELDS))}")

    salts = given["salts"]
    if not os.environ.get(CONTROL_TOKEN) or not hmac.compare_digest(
        str(given["proof"]), _proof(cache_salt, salts)
    ):
        raise ValueError("shared namespaces are granted by the API server only")

    return tuple(salts)


def _proof(cache_salt: str, salts: Sequence[str]) -> str:
    """Return a MAC over the grant, with the secret that API server and engine share."""
    secret = os.environ.get(CONTROL_TOKEN, "")
    return hmac.new(
        secret.encode(), json.dumps([GRANTED, cache_salt, *salts]).encode(), "sha256"
    ).hexdigest()
