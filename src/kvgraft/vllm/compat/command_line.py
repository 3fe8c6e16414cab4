"""vLLM's command line, from where its version has put it, and the configuration that it stands
for."""

import os
from argparse import Namespace
from copy import deepcopy
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

try:  # 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # 0.31, 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

try:
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
except ImportError:  # elsewhere the server itself refuses what this checks, with a traceback

    def validate_api_server_args(args: Namespace) -> None:
        """Check nothing."""


__all__ = [
    "cli_env_setup",
    "engine_config",
    "make_arg_parser",
    "validate_api_server_args",
    "validate_parsed_serve_args",
]


def engine_config(args: Namespace) -> Any:
    """vLLM's configuration of an engine, made as its server makes it; arguments and environment
    stay as they are.

    Raises:
        ValueError: these arguments make none; the message says why.
    """
    environment = dict(os.environ)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(deepcopy(args))
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except OSError:
        raise
    except Exception as error:  # pydantic's, assertions, whatever a platform raises
        raise ValueError(f"vLLM refuses this configuration: {_said(error)}") from error
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _said(error: Exception) -> str:
    """The messages of an error, without what pydantic adds to them."""
    if not hasattr(error, "errors"):
        return str(error) or type(error).__name__
    return "; ".join(str(found["msg"]).removeprefix("Value error, ") for found in error.errors())
