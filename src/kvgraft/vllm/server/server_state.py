"""What one server shares between its routes: keys, cache keys, the request log, and the way into the engine."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from kvgraft.vllm.server.engine_client import GuardedEngineClient
from kvgraft.vllm.server.frozen import FrozenSegments
from kvgraft.vllm.server.keys import Keys
from kvgraft.vllm.server.request_log import RequestLog
from kvgraft.vllm.server.tenancy import Keyring, Salts
from kvgraft.vllm.settings import KVGraftSettings


class ServerState:
    """The state of one API server process, kept in `app.state.kvgraft`.

    Raises:
        ValueError: the arguments would let tenants share what they must not.
    """

    def __init__(self, args: Namespace) -> None:
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ValueError("one API server process only: each would have its own cache keys and its own records")
        self.keyring = Keyring(Keys.of(args))
        self.settings = _settings(args)
        self.default = self.settings.default
        store = self.settings.store
        self.salts = Salts(None if store is None or store.directory is None else Path(store.directory))
        self.request_log = RequestLog(self.keyring.tenants)
        self.segments = FrozenSegments(
            lambda: self.engine_client, self.settings.frozen_quota or 1 / len(self.keyring.tenants)
        )
        self._engine_client: GuardedEngineClient | None = None

    @property
    def engine_client(self) -> GuardedEngineClient:
        """The way into the engine.

        Raises:
            RuntimeError: the engine is not connected yet.
        """
        if self._engine_client is None:
            raise RuntimeError("the API server has no engine yet")
        return self._engine_client

    def connect(self, engine_client: Any) -> None:
        """Guard the engine client that the routes of this server use."""
        self._engine_client = GuardedEngineClient(engine_client, self.salts, self.request_log, self.default)


def _settings(args: Namespace) -> KVGraftSettings:
    """What the connector is told."""
    config = getattr(args, "kv_transfer_config", None)
    return KVGraftSettings.parse(config.kv_connector_extra_config if config else {})
