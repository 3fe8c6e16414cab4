"""State that the routes of one server share: keys, cache keys, the request log and the engine
client."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from kvgraft.server.engine_choice import EngineChoice
from kvgraft.server.engine_client import TenantEngineClient
from kvgraft.server.engine_probe import EngineProbe, default_limit_s
from kvgraft.server.guarding import ServerGuard
from kvgraft.server.idle_refresher import IdleRefresher
from kvgraft.server.keys import Keys
from kvgraft.server.lifecycle import Drain
from kvgraft.server.metrics import FirstTokens
from kvgraft.server.pins import TenantPins
from kvgraft.server.request_log import RequestLog
from kvgraft.server.sharing import SHARED, Grants
from kvgraft.server.tenancy import Keyring, Principal, Salts, Tenant
from kvgraft.vllm.setting_fields import SHADOW
from kvgraft.vllm.settings import KVGraftSettings


class ServerState:
    """State of one API server process, stored in `app.state.kvgraft`.

    Raises:
        ValueError: the arguments would let tenants share what they must not.
    """

    def __init__(self, args: Namespace) -> None:
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ValueError(
                "one API server process only: each would have its own cache keys and its own "
                "records"
            )

        self.keyring = Keyring(Keys.of(args))
        self.grants = Grants.of(args, self.keyring)
        self.settings = _settings(args)

        self.default = self.settings.default
        store = self.settings.store
        self.salts = Salts(
            None if store is None or store.directory is None else Path(store.directory)
        )

        self.request_log = RequestLog(self.keyring.tenants)
        num_owners = len(self.keyring.tenants) + bool(self.grants.names)
        self.pins = TenantPins(
            lambda: self.engine_client, self.settings.pin_quota or 1 / num_owners
        )

        self.drain = Drain(getattr(args, "shutdown_timeout", 0))
        limit_s = getattr(args, "kvgraft_engine_timeout", None)
        self._silence_limit_s = default_limit_s() if limit_s is None else limit_s
        self._probe: EngineProbe | None = None
        self._engine_client: TenantEngineClient | None = None
        self._idle_refresher: IdleRefresher | None = None

    @property
    def engine_client(self) -> TenantEngineClient:
        """The connected engine client.

        Raises:
            RuntimeError: the engine is not connected yet.
        """
        if self._engine_client is None:
            raise RuntimeError("the API server has no engine yet")
        return self._engine_client

    @property
    def engine_silent_s(self) -> float | None:
        """Seconds since the engine's last answer; None if there is no engine."""
        return None if self._probe is None else self._probe.silent_s

    def engine_problem(self) -> str | None:
        """Return why the engine counts as frozen; None if it answers in time, or if there is no
        engine."""
        return None if self._probe is None else self._probe.problem

    def owner(self, label: str | None, namespace: str) -> Tenant:
        """Return the tenant whose pinned documents the admin names.

        Args:
            label: name or label of a tenant; None: the only tenant; "shared": the owner of shared
                namespaces.
            namespace: checked only if `label` is "shared".

        Raises:
            ValueError: there is no such tenant or shared namespace; the message lists those that
                exist.
        """
        if label != SHARED.label:
            return self.keyring.tenant(label)
        if namespace not in self.grants.names:
            known = ", ".join(self.grants.names) or "none"
            raise ValueError(f"no shared namespace {namespace!r}: there are {known}")
        return SHARED

    def guard_view(self, principal: Principal) -> dict[str, Any] | None:
        """Return the part of the guard's results that the caller may see; None if there is no
        guard."""
        guard = None if self._engine_client is None else self._engine_client.guard
        if guard is None:
            return None
        sees_all = principal.is_admin or self.keyring.has_one_tenant
        return guard.view(None if sees_all else principal.tenant.name)

    def connect(self, engine_client: Any) -> None:
        """Wrap the engine client that the routes use, and start the probe, the guard and the idle
        refresh.

        Call it in the event loop that serves the requests.
        """
        self._engine_client = TenantEngineClient(
            engine_client,
            self.salts,
            self.grants,
            self.request_log,
            self.default,
            EngineChoice.of(engine_client, grafts=self.settings.mode != SHADOW),
        )

        self._probe = EngineProbe(engine_client, self._silence_limit_s)
        self.drain.abort_requests = self._engine_client.abort_all
        self._engine_client.exact_for = frozenset(self.settings.exact_for)

        model_name = engine_client.vllm_config.model_config.served_model_name
        self.request_log.on_entry = FirstTokens(model_name).observe
        if self.settings.guard:
            self._engine_client.guard = ServerGuard(self.settings, self._engine_client, model_name)
        if self.settings.idle_refresh:
            self._idle_refresher = IdleRefresher(self._engine_client)


def _settings(args: Namespace) -> KVGraftSettings:
    """Return the connector's configuration."""
    config = getattr(args, "kv_transfer_config", None)
    return KVGraftSettings.parse(config.kv_connector_extra_config if config else {})
