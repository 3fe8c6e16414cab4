"""`kvgraft serve`: vLLM's API server with our connector, worker, middleware and routes."""

import os
import secrets
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import entry_points

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.logger import configure_logging_from_args, init_logger

from kvgraft.vllm.compat.command_line import cli_env_setup, validate_parsed_serve_args
from kvgraft.vllm.options import CONTROL_TOKEN
from kvgraft.vllm.server.arguments import parse
from kvgraft.vllm.settings import KVGraftSettings

logger = init_logger(f"vllm.{__name__}")  # of vLLM's own handler
PLUGIN, PLUGINS = "kvgraft", "VLLM_PLUGINS"
ENDPOINTS = "vllm.endpoint_plugins"
OTHER_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is told to stop.

    Raises:
        ValueError: the command line cannot be served; the message says why.
    """
    cli_env_setup()
    args = parse(arguments)
    try:
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    prepare_environment(args)
    if not args.no_kvgraft:
        settings = KVGraftSettings.parse(args.kv_transfer_config.kv_connector_extra_config)
        logger.info("KVGraft: %s", settings.policy_profile or f"policy {settings.default_policy}")
    uvloop.run(run_server(args))


def prepare_environment(args: Namespace) -> None:
    """Set what the processes of the server read from the environment, before any of them starts.

    Raises:
        ValueError: this installation does not register our endpoint plugin with vLLM.
    """
    if args.no_kvgraft:
        return
    found = list(entry_points(group=ENDPOINTS, name=PLUGIN))
    if not found:
        raise ValueError(f"this installation registers no {PLUGIN!r} in {ENDPOINTS}: install kvgraft again")
    found[0].load()  # vLLM would log an error here and serve without it
    os.environ[PLUGINS] = allowed_plugins(os.environ.get(PLUGINS))
    os.environ[CONTROL_TOKEN] = secrets.token_hex(32)


def allowed_plugins(given: str | None) -> str:
    """A value of VLLM_PLUGINS that adds ours, and takes no plugin away that vLLM would load without the variable."""
    if given is not None:
        names = {name for name in given.split(",") if name}
    else:
        names = {point.name for group in OTHER_GROUPS for point in entry_points(group=group)}
    return ",".join(sorted(names | {PLUGIN}))
