"""What one request may read of shared namespaces, on its way from the API server to the engine."""

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvgraft.vllm.options import CONTROL_TOKEN

GRANTED = "kvgraft_granted"  # in kv_transfer_params, which clients cannot send
_FIELDS = {"salts", "proof"}


def granted_params(cache_salt: str, salts: Sequence[str]) -> dict[str, Any]:
    """The namespaces with these cache keys, for a request with this one; with a proof that the API
    server says so."""
    return {"salts": list(salts), "proof": _proof(cache_salt, salts)}


def granted_salts(given: Any, cache_salt: str) -> tuple[str, ...]:
    """The cache keys of the namespaces that a request may graft from beside its own.

    Args:
        given: what `granted_params` has made; None: there are none.

    Raises:
        ValueError: the API server has not made this, or not for a request with this cache key.
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
    """What only those can make who know the secret that API server and engine share."""
    secret = os.environ.get(CONTROL_TOKEN, "")
    return hmac.new(
        secret.encode(), json.dumps([GRANTED, cache_salt, *salts]).encode(), "sha256"
    ).hexdigest()
