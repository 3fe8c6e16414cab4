"""Adds tenants, reports and our routes to vLLM's API server, through its interface for endpoint
plugins.

Named `kvgraft` in the entry points of group `vllm.endpoint_plugins`; vLLM loads it only where
`VLLM_PLUGINS` names it, as `kvgraft serve` does."""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from vllm.logger import init_logger

from kvgraft.vllm.server import pin_routes, status
from kvgraft.vllm.server.errors import Refused, answer_refusal
from kvgraft.vllm.server.lifecycle import DrainMiddleware
from kvgraft.vllm.server.middleware import ServerMiddleware
from kvgraft.vllm.server.server_state import ServerState
from kvgraft.vllm.settings import TOOLS

logger = init_logger(f"vllm.{__name__}")  # of vLLM's own handler


class ServerPlugin:
    """Satisfies `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "kvgraft"
    required_tasks = None  # on every server, lest one go without it

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes, and our middleware around all routes of the server.

        It takes over the API keys: vLLM's own check knows no tenants and leaves routes open.

        Raises:
            ValueError: the arguments would let tenants share what they must not.
        """
        state = app.state.kvgraft = ServerState(app.state.args)
        app.state.args.api_key = [""]  # no key for vLLM to check, whatever the environment says
        app.include_router(pin_routes.router)
        app.include_router(status.router)
        app.add_exception_handler(Refused, answer_refusal)
        app.add_middleware(
            ServerMiddleware,
            keyring=state.keyring,
            grants=state.grants,
            default=state.default,
            finds_tools=TOOLS in state.settings.exact_for,
        )
        app.add_middleware(DrainMiddleware, drain=state.drain, silence=state.engine_problem)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Guard the engine client, before the server listens; a server that only renders prompts
        has none."""
        if engine_client is not None:
            state.kvgraft.connect(engine_client)
            if not args.uds:
                scheme = "https" if args.ssl_keyfile else "http"
                logger.info(
                    "KVGraft's page: %s://%s:%d/kvgraft",
                    scheme,
                    args.host or "127.0.0.1",
                    args.port,
                )
