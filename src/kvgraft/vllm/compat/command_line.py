"""vLLM's command line, from where its version has put it."""

try:  # 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # 0.31, 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

__all__ = ["cli_env_setup", "make_arg_parser", "validate_parsed_serve_args"]
