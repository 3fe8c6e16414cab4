"""Endpoint plugin that adds tenants, reports and KVGraft's routes to vLLM's API server.

The plugin is named `kvgraft` in the entry point group `vllm.endpoint_plugins`. vLLM loads it only
if `VLLM_PLUGINS` names it; `kvgraft serve` sets this variable.
"""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from vllm.logger import init_logger

from kvgraft.server import pin_routes, status
from kvgraft.server.errors import Refused, answer_refusal
from kvgraft.server.lifecycle import DrainMiddleware
from kvgraft.server.middleware import ServerMiddleware
from kvgraft.server.server_state import ServerState
from kvgraft.vllm.patches.model_list import hide_paths
from kvgraft.vllm.setting_fields import TOOLS

# a child of vLLM's logger, so that its handler prints the messages
logger = init_logger(f"vllm.{__name__}")


class ServerPlugin:
    """Implementation of `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "kvgraft"
    # None loads the plugin on every server, for any task of its model
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add KVGraft's routes, and its middleware around all routes of the server.

        The middleware checks the API keys instead of vLLM. vLLM's own check knows no tenants and
        leaves some routes open.

        Raises:
            ValueError: the arguments would let tenants share what they must not.
        """
        state = app.state.kvgraft = ServerState(app.state.args)
        # an empty list would make vLLM read VLLM_API_KEY and check keys itself
        app.state.args.api_key = [""]

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
        app.add_middleware(
            DrainMiddleware,
            drain=state.drain,
            silence=state.engine_problem,
            on_start=lambda: log_page(app.state.args),
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the server state to the engine client before the server listens.

        A server that only renders prompts has no engine client.
        """
        if engine_client is not None:
            state.kvgraft.connect(engine_client)
            hide_paths(state.openai_serving_models)


def log_page(args: Namespace) -> None:
    """Log the address of the page, after vLLM's list of routes, where it is seen."""
    if not args.uds:
        scheme = "https" if args.ssl_certfile else "http"
        logger.info(
            "KVGraft's page: %s://%s:%d/kvgraft", scheme, args.host or "127.0.0.1", args.port
        )
