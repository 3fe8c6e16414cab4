"""What one server shares between its routes: keys, cache keys, the ledger, and the way into the engine."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from kvgraft.vllm.server.frozen import FrozenSegments
from kvgraft.vllm.server.guard import EngineGuard
from kvgraft.vllm.server.keys import Keys
from kvgraft.vllm.server.ledger import Ledger
from kvgraft.vllm.server.tenancy import Keyring, Salts
from kvgraft.vllm.settings import Settings


class FrontDoor:
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
        self.ledger = Ledger(self.keyring.tenants)
        self.segments = FrozenSegments(lambda: self.guard, self.settings.frozen_quota or 1 / len(self.keyring.tenants))
        self._guard: EngineGuard | None = None

    @property
    def guard(self) -> EngineGuard:
        """The way into the engine.

        Raises:
            RuntimeError: the engine is not connected yet.
        """
        if self._guard is None:
            raise RuntimeError("the front door has no engine yet")
        return self._guard

    def connect(self, engine_client: Any) -> None:
        """Guard the engine client that the routes of this server use."""
        self._guard = EngineGuard(engine_client, self.salts, self.ledger, self.default)


def _settings(args: Namespace) -> Settings:
    """What the connector is told."""
    config = getattr(args, "kv_transfer_config", None)
    return Settings.parse(config.kv_connector_extra_config if config else {})
