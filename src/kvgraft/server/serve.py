"""Start of `kvgraft serve`: vLLM's API server with KVGraft's connector, worker, middleware and
routes."""

import logging
import os
import secrets
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.logger import configure_logging_from_args, init_logger

from kvgraft.server.arguments import parse
from kvgraft.server.checks import check_parsed
from kvgraft.server.lifecycle import end_children
from kvgraft.server.summary import ConfigurationSummary
from kvgraft.vllm.compat.command_line import (
    cli_env_setup,
    engine_config,
    validate_api_server_args,
    validate_parsed_serve_args,
)
from kvgraft.vllm.compat.support import (
    UnsupportedConfiguration,
    check_by_head,
    check_config,
)
from kvgraft.vllm.options import CONTROL_TOKEN
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.sparse.program import check_flow

# a child of vLLM's logger, so that its handler prints the messages
logger = init_logger(f"vllm.{__name__}")
PLUGIN, PLUGINS = "kvgraft", "VLLM_PLUGINS"
ENDPOINTS = "vllm.endpoint_plugins"
OTHER_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is asked to stop.

    Raises:
        ValueError: the command line cannot be served; the message says why.
    """
    args = _checked(arguments)
    if not args.no_kvgraft or args.additional_config:
        with _quiet():
            _check(args, engine_config(args))
    if not args.no_kvgraft:
        settings = KVGraftSettings.parse(args.kv_transfer_config.kv_connector_extra_config)
        logger.info("KVGraft: %s", settings.policy_profile or f"policy {settings.default_policy}")

    try:
        uvloop.run(run_server(args))
    finally:
        end_children()


def summarize(arguments: Sequence[str]) -> ConfigurationSummary:
    """Return the configuration that `serve` would use, without loading a model or listening.

    Raises:
        ValueError: the command line cannot be served; the message says why.
    """
    args = _checked(arguments)
    with _quiet():
        config = engine_config(args)
    _check(args, config)
    return ConfigurationSummary.of(args, config)


def _checked(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments and run every check that needs no vLLM configuration."""
    cli_env_setup()
    args = parse(arguments)
    try:
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except (KeyError, TypeError) as error:
        raise ValueError(str(error.args[0] if error.args else error)) from error
    check_parsed(args)
    prepare_environment(args)
    return args


def _check(args: Namespace, config: Any) -> None:
    """Run the checks that need vLLM's configuration.

    Raises:
        ValueError: it cannot be served; the message says why.
    """
    reasons = list[str]()
    for check in (check_by_head if args.no_kvgraft else check_config, check_flow):
        try:
            check(config)
        except UnsupportedConfiguration as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence vLLM's log below warnings while a configuration is built only to be checked.

    vLLM logs the same lines again for the configuration that the server uses.
    """
    theirs = logging.getLogger("vllm")
    level = theirs.level
    theirs.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        theirs.setLevel(level)


def prepare_environment(args: Namespace) -> None:
    """Set the environment variables that the server's processes read, before any of them starts.

    Raises:
        ValueError: this installation does not register KVGraft's endpoint plugin with vLLM.
    """
    if args.no_kvgraft:
        return

    found = list(entry_points(group=ENDPOINTS, name=PLUGIN))
    if not found:
        raise ValueError(
            f"this installation registers no {PLUGIN!r} in {ENDPOINTS}: install kvgraft again"
        )
    # load it here to raise its error: vLLM would only log it and serve without the plugin
    found[0].load()

    os.environ[PLUGINS] = allowed_plugins(os.environ.get(PLUGINS))
    os.environ[CONTROL_TOKEN] = secrets.token_hex(32)


def allowed_plugins(given: str | None) -> str:
    """Return a value of VLLM_PLUGINS that adds `kvgraft` and keeps every plugin that vLLM loads
    now.

    Args:
        given: the present value; None if it is not set, in which case vLLM loads all plugins.
    """
    if given is not None:
        names = {name for name in given.split(",") if name}
    else:
        names = {point.name for group in OTHER_GROUPS for point in entry_points(group=group)}
    return ",".join(sorted(names | {PLUGIN}))
