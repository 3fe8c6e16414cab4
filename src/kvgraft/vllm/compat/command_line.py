"""vLLM's command line in each version, and the configuration that it describes."""

import os
from argparse import Namespace
from copy import deepcopy
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

# vLLM 0.33
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
# vLLM 0.31 and 0.32
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

try:
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
# In other versions the server itself refuses what this checks, with a traceback.
except ImportError:

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
    """Return vLLM's engine configuration, made as its server makes it.

    Arguments and environment stay as they are.

    Raises:
        ValueError: vLLM refuses these arguments; the message says why.
    """
    environment = dict(os.environ)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(deepcopy(args))
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except OSError:
        raise
    # pydantic errors, assertions and errors of the platform
    except Exception as error:
        raise ValueError(f"vLLM refuses this configuration: {_said(error)}") from error
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _said(error: Exception) -> str:
    """Return the messages of an error, without what pydantic adds to them."""
    if not hasattr(error, "errors"):
        return str(error) or type(error).__name__
    return "; ".join(str(found["msg"]).removeprefix("Value error, ") for found in error.errors())
