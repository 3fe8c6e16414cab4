"""Command line of `kvgraft serve`: vLLM's own, with KVGraft's defaults, flags and checks."""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvgraft.engine.checkpoint import identify, read_json
from kvgraft.engine.profiles import MAKE_MAP, load_policy_profile
from kvgraft.flows import parse_flow
from kvgraft.kv.heads import HEAD_MAP_FILE
from kvgraft.models import BUNDLED, KNOWN, find_model, is_name
from kvgraft.policies.profile import POLICY_FILE
from kvgraft.server.engine_choice import resets_are_complete
from kvgraft.server.flags import PREFIX, add_flags
from kvgraft.server.keys import API_KEY, Keys, given_keys
from kvgraft.server.lifecycle import DRAIN_S
from kvgraft.server.logprob_recorder import NUM_LOGPROBS
from kvgraft.server.sharing import Grants
from kvgraft.server.tenancy import Keyring
from kvgraft.vllm.compat import (
    ALLOW_UNTESTED,
    BY_HEAD,
    CONNECTOR,
    FLOW,
    HEAD_MAP,
    WORKER_CLASS,
    transfer_config,
)
from kvgraft.vllm.compat.command_line import make_arg_parser
from kvgraft.vllm.compat.families import BY_HEAD_ARCHITECTURES
from kvgraft.vllm.patches.forced_tokens import RAW
from kvgraft.vllm.settings import KVGraftSettings, given_settings

# tokens; with vLLM's 128, more tokens at the edges of segments cannot be reused
CPU_BLOCK_SIZE = 32
# the bundled model's words are separated by spaces
BUNDLED_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
# without this, vLLM takes most of the machine's memory
BUNDLED_KV_BYTES = 1 << 30
# the same limit for models that can be fetched by name
KNOWN_KV_BYTES = 2 << 30
NEVER = ("trust_remote_code", "trust_request_chat_template", "enable_prompt_embeds")
# ways of data parallelism in which engines run elsewhere, or others choose among them
ENGINES_ELSEWHERE = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
)
# flags that are allowed with --no-kvgraft
WITHOUT_REUSE = ("kvgraft_flow", "kvgraft_head_paging")
# flags that are allowed with both --no-kvgraft and --kvgraft-head-paging
BESIDE_HEAD_PAGING = ("kvgraft_head_map", ALLOW_UNTESTED)


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the arguments with which vLLM's server is started.

    Raises:
        ValueError: the arguments contradict each other; the message says how.
    """
    parser = _make_parser()
    args = parser.parse_args(list(arguments))
    args.model = args.model_tag or args.model
    # also refuse empty keys if vLLM itself is going to check them (--no-kvgraft)
    given_keys("--api-key", args.api_key, API_KEY)

    if args.model == BUNDLED and is_name(BUNDLED):
        args.model = str(find_model(BUNDLED))
        args.served_model_name = args.served_model_name or [BUNDLED]
        args.chat_template = args.chat_template or BUNDLED_CHAT
        args.kv_cache_memory_bytes = args.kv_cache_memory_bytes or BUNDLED_KV_BYTES
    elif is_name(args.model):
        _serve_by_name(args)

    if args.kvgraft_head_paging:
        _refuse(_flags_beside_head_paging(args))
        _keep_heads_by_class(args)
    if args.kvgraft_flow is not None:
        _follow(args)

    if args.no_kvgraft:
        _refuse(_flags_beside_plain(args))
        return args

    _refuse(_conflicts(args))
    args.enable_prefix_caching = True
    args.worker_cls = WORKER_CLASS

    _find_profile(args)
    args.kv_transfer_config = args.kv_transfer_config or transfer_config(**given_settings(args))
    if KVGraftSettings.parse(args.kv_transfer_config.kv_connector_extra_config).guard:
        _refuse(_flags_beside_guard(args))

    keyring = Keyring(Keys.of(args))
    # labels instead of keys, because vLLM logs its arguments
    args.kvgraft_share = Grants.of(args, keyring).as_arguments or None
    args.kvgraft_tenant = keyring.names_as_arguments or None
    return args


def _make_parser() -> FlexibleArgumentParser:
    """Return vLLM's argument parser with KVGraft's defaults and flags."""
    parser = make_arg_parser(
        FlexibleArgumentParser(prog="kvgraft serve", usage="kvgraft serve [MODEL] [options]")
    )
    parser.set_defaults(
        model=BUNDLED,
        host="127.0.0.1",
        allowed_origins=[],
        enable_prompt_tokens_details=True,
    )
    # keep sliding-window blocks at every position, because a graft can end anywhere
    parser.set_defaults(prefix_cache_retention_interval=None)
    parser.set_defaults(shutdown_timeout=DRAIN_S)

    if current_platform.is_cpu():
        parser.set_defaults(block_size=CPU_BLOCK_SIZE, enforce_eager=True)

    add_flags(parser)
    return parser


def _serve_by_name(args: Namespace) -> None:
    """Replace the model's name by its directory, and serve the model under that name.

    Known models run as float32 on a CPU: they were not made for bfloat16, which vLLM chooses there.
    """
    name = args.model
    args.model = str(find_model(name, fetch=not args.check))
    args.served_model_name = args.served_model_name or [name]
    if name in KNOWN and current_platform.is_cpu():
        args.kv_cache_memory_bytes = args.kv_cache_memory_bytes or KNOWN_KV_BYTES
        args.dtype = "float32" if args.dtype == "auto" else args.dtype


def _find_profile(args: Namespace) -> None:
    """Select the policy profile next to the weights if nothing else sets the default policy.

    A profile given with --kvgraft-profile is checked in the same way.

    Raises:
        FileNotFoundError, ValueError: the given profile cannot be used; the message says why.
    """
    given, model = args.kvgraft_profile, Path(args.model)
    if given is None and (
        args.kvgraft_policy or args.kv_transfer_config or not (model / POLICY_FILE).is_file()
    ):
        return

    if load_policy_profile(given, model, identify(model)) is not None:
        args.kvgraft_profile = str(Path(given or model / POLICY_FILE).absolute())


def _conflicts(args: Namespace) -> Iterator[str]:
    """Yield a reason for each argument that cannot be combined with reuse."""
    config = args.kv_transfer_config
    if config is not None and config.kv_connector != CONNECTOR:
        yield (
            f"--kv-transfer-config names {config.kv_connector!r}: one connector at a time, as "
            "others keep grafts"
        )
    if args.kv_offloading_size is not None:
        yield (
            "--kv-offloading-size: it puts another connector in the place of ours; use "
            "--kvgraft-store-ram-gib"
        )
    if config is not None and given_settings(args):
        yield (
            "settings of reuse stand either in --kv-transfer-config or in --kvgraft-* flags, not "
            "in both"
        )

    if args.enable_prefix_caching is False:
        yield (
            "--no-enable-prefix-caching: reuse finds its sources in the blocks of the prefix cache"
        )
    if args.worker_cls not in ("auto", WORKER_CLASS):
        yield f"--worker-cls {args.worker_cls}: ours is {WORKER_CLASS}"

    if args.kvgraft_idle_refresh and args.enable_sleep_mode:
        yield "--kvgraft-idle-refresh: an engine that sleeps must not read (--enable-sleep-mode)"

    if (args.api_server_count or 1) > 1:
        yield (
            "--api-server-count: one process only, as each would have its own cache keys and its "
            "own records"
        )
    yield from _engine_conflicts(args)

    if args.headless or args.grpc or getattr(args, "grpc_port", None) is not None:
        yield (
            "--headless, --grpc, --grpc-port: they pass by our middleware, which keeps tenants "
            "apart"
        )

    for name in NEVER:
        if getattr(args, name):
            yield (
                f"--{name.replace('_', '-')}: this server runs no code and reads no tensors that "
                "others bring"
            )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        yield "VLLM_USE_RUST_FRONTEND: it passes by our middleware, which keeps tenants apart"


def _engine_conflicts(args: Namespace) -> Iterator[str]:
    """Yield a reason for each way of data parallelism in which others would choose the engine of a
    prompt, or that has not been tested."""
    given = {name: getattr(args, name) for name in ENGINES_ELSEWHERE}
    if flags := [
        f"--{name.replace('_', '-')}"
        for name, value in given.items()
        if value is not None and value is not False
    ]:
        yield (
            f"{', '.join(flags)}: this server starts all engines itself and chooses the engine of "
            "each prompt; give --data-parallel-size only, or use `kvgraft fleet` for several "
            "machines"
        )
    if args.data_parallel_size > 1 and args.data_parallel_backend != "mp":
        yield f"--data-parallel-backend {args.data_parallel_backend}: only mp has been tested"
    if args.nnodes > 1:
        yield f"--nnodes {args.nnodes}: all engines must run on this machine"
    if args.data_parallel_size > 1 and not resets_are_complete():
        yield (
            "--data-parallel-size with this vLLM, whose answer to a cache reset covers the first "
            "engine only: use vLLM 0.32"
        )
    if args.enable_elastic_ep:
        yield "--enable-elastic-ep: the number of engines must stay the same"


def _flags_beside_guard(args: Namespace) -> Iterator[str]:
    """Yield a reason for each argument that cannot be combined with --kvgraft-guard."""
    if args.enable_sleep_mode:
        yield "--kvgraft-guard: an engine that sleeps must not score (--enable-sleep-mode)"

    if args.logprobs_mode != RAW:
        yield (
            f"--kvgraft-guard: answers are scored by {RAW}, not by --logprobs-mode "
            f"{args.logprobs_mode}"
        )

    if 0 <= args.max_logprobs < NUM_LOGPROBS:
        yield (
            f"--kvgraft-guard: it needs --max-logprobs of at least {NUM_LOGPROBS}, got "
            f"{args.max_logprobs}"
        )

    if args.speculative_config is not None:
        yield (
            "--kvgraft-guard: drafts (--speculative-config) would stand in the answers that are "
            "scored"
        )


def _follow(args: Namespace) -> None:
    """Pass the decode flow to every process of the server.

    Raises:
        FileNotFoundError, ValueError: the flow does not exist.
    """
    parse_flow(args.kvgraft_flow)
    path, dot, rest = args.kvgraft_flow.partition(".py")

    named = f"{Path(path).absolute()}{dot}{rest}" if dot else path
    args.additional_config = {**(args.additional_config or {}), FLOW: named}
    args.worker_cls = WORKER_CLASS if args.worker_cls == "auto" else args.worker_cls


def _keep_heads_by_class(args: Namespace) -> None:
    """Select the model class that has one attention layer per KV head (--kvgraft-head-paging).

    Raises:
        FileNotFoundError: there is no such model directory.
        ValueError: the model's architecture is not supported.
    """
    architecture = _architecture(Path(args.model))
    if architecture not in BY_HEAD_ARCHITECTURES:
        known = ", ".join(BY_HEAD_ARCHITECTURES)
        raise ValueError(
            f"--kvgraft-head-paging: model class {architecture}: supported are {known}, of which "
            "`kvgraft profile-heads` makes head maps"
        )

    args.hf_overrides = {"architectures": [f"{BY_HEAD}{architecture}"]}
    args.additional_config = {
        **(args.additional_config or {}),
        HEAD_MAP: str(_head_map(args).absolute()),
    }
    if args.kvgraft_allow_untested:
        args.additional_config[ALLOW_UNTESTED] = True


class _Named(msgspec.Struct):
    """Part of a checkpoint's configuration."""

    architectures: list[str] | None = None


def _architecture(model: Path) -> str | None:
    """Return the model class that a checkpoint names; None if it names none."""
    names = read_json(model / "config.json", _Named).architectures
    return names[0] if names else None


def _head_map(args: Namespace) -> Path:
    """Return the path of the head map: the one given, or the file next to the weights."""
    return Path(args.kvgraft_head_map or Path(args.model) / HEAD_MAP_FILE)


def _flags_beside_head_paging(args: Namespace) -> Iterator[str]:
    """Yield a reason for each argument that cannot be combined with --kvgraft-head-paging."""
    if args.kvgraft_residual_layers is not None:
        yield (
            "--kvgraft-residual-layers does not go with --kvgraft-head-paging: it takes all heads "
            "for equal"
        )
    if args.hf_overrides:
        yield "--hf-overrides does not go with --kvgraft-head-paging, which names the model class"
    if not _head_map(args).is_file():
        yield (
            f"--kvgraft-head-paging: no head map {_head_map(args)}; {MAKE_MAP}, or give "
            "--kvgraft-head-map"
        )


def _flags_beside_plain(args: Namespace) -> Iterator[str]:
    """Yield a reason for each argument that cannot be combined with --no-kvgraft."""
    for name in _own_flags(args):
        if name not in WITHOUT_REUSE and (
            name not in BESIDE_HEAD_PAGING or not args.kvgraft_head_paging
        ):
            yield f"--no-kvgraft does not go with --{name.replace('_', '-')}"


def _own_flags(args: Namespace) -> list[str]:
    """Return the names of KVGraft's flags that were given, except --no-kvgraft."""
    return [
        n
        for n, value in vars(args).items()
        if n.startswith(PREFIX) and value is not None and value is not False
    ]


def _refuse(reasons: Iterator[str]) -> None:
    """Raise ValueError with all reasons, if there are any."""
    found = list(reasons)
    if found:
        raise ValueError("; ".join(found))
