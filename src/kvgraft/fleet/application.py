"""A fleet as an application of Ray Serve: from a command line, or from a configuration file of
Ray."""

import asyncio
import os
import secrets
import signal
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.ingress import Ingress
from kvgraft.fleet.options import FleetOptions
from kvgraft.fleet.replica import INGRESS, REPLICA, STOP_S, Replica
from kvgraft.fleet.router import SegmentRouter
from kvgraft.segments.store.secret import CACHE_SECRET
from kvgraft.vllm.server.keys import ADMIN_KEY, API_KEY, Keys, check_exposure
from kvgraft.vllm.server.process import KVGRAFT

FLUSH_S = 2.0  # in which clients are sent what is left, once servers have ended
CALL_S = 5.0  # beside what was asked for, until a process has answered


async def _end(ingresses: DeploymentHandle, replicas: DeploymentHandle, drain_s: float) -> None:
    await ask_all(ingresses, "drain", drain_s, within_s=drain_s + CALL_S)

    # What is still in flight loses its server here: the ingress sends its clients an error.
    await ask_all(replicas, "end", within_s=STOP_S + CALL_S)
    await ask_all(ingresses, "drain", FLUSH_S, within_s=FLUSH_S + CALL_S)


NAME = "kvgraft"
IN_FLIGHT = 256  # requests that a server has at most; vLLM has a queue of its own
QUIET = LoggingConfig(enable_access_log=False)  # the servers log requests already


def build(args: Mapping[str, Any]) -> Application:
    """The application, from the fields of `FleetOptions`: `import_path:
    kvgraft.fleet.application:build`.

    Raises:
        ValueError: unknown fields, flags that cannot be served, or neither API keys nor
            --kvgraft-single-tenant: where Ray listens is not known here.
    """
    options = msgspec.convert(dict(args), FleetOptions)
    _check_exposure(options, host=None)
    return application(options)


def application(options: FleetOptions) -> Application:
    """As `build`; the servers' flags are checked here, before any of them starts."""
    served = _served(options)
    names = served.served_model_name or [served.model]
    return assemble(options, Keys.of(served), names, EnvironmentCheck.here(must_be_alike(options)))


def assemble(
    options: FleetOptions,
    keys: Keys,
    names: Sequence[str],
    alike: EnvironmentCheck,
    program: Sequence[str] = KVGRAFT,
) -> Application:
    """As `application`, of what was checked. Servers run `program` (see `running`)."""
    routing: dict[str, Any] = {
        "request_router_class": SegmentRouter,
        "request_router_kwargs": {"imbalance": options.imbalance, "routing": options.routing},
        "request_routing_stats_period_s": options.sketch_s,
    }
    replica = _deployment(Replica).options(
        name=REPLICA,
        max_ongoing_requests=IN_FLIGHT,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=options.drain_s,
        health_check_period_s=5,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(**routing),
        **_scaling(options),
    )
    ingress = _deployment(Ingress).options(
        name=INGRESS,
        num_replicas=options.ingresses,
        max_ongoing_requests=1 << 16,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        graceful_shutdown_timeout_s=options.drain_s,
    )
    servers = replica.bind(options.command, _environment(options), alike, program)
    return ingress.bind(servers, keys, names, secrets.token_bytes(32))


def must_be_alike(options: FleetOptions) -> list[str]:
    """Environment variables that all machines must have alike. A secret that is not set here others
    may have."""
    served = _served(options)
    flags = {API_KEY: served.api_key, ADMIN_KEY: getattr(served, "kvgraft_admin_key", None)}
    return [
        *(name for name, given in flags.items() if given is None),
        *({CACHE_SECRET} & os.environ.keys()),
    ]


def run(options: FleetOptions, args: Namespace) -> None:
    """`kvgraft fleet`: serve on this machine until it is asked to stop, by SIGTERM or Ctrl-C, then
    finish what is in flight. On a Ray cluster: start the fleet, or replace the one that runs there
    step by step, and leave it there.

    Args:
        options, args: see `read_command`.

    Raises:
        ValueError: what was given does not go together, or no server has started.
    """
    _check_exposure(options, args.host)
    app = application(options)
    start_ray(options, args.host, args.port, args.address)
    for number in (signal.SIGTERM, signal.SIGINT) if args.address is None else ():
        signal.signal(number, _interrupt)
    try:
        _start(app)
        print(f"kvgraft fleet: http://{args.host}:{args.port}", flush=True)
        if args.address is None:
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
            end_fleet(NAME, options.drain_s)  # a second signal cuts this short
    finally:
        if args.address is None:
            ray.shutdown()  # with all processes of this Ray, and with them whatever listens


def _start(app: Application) -> None:
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the fleet has not started, see what its servers say: {error}") from error


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def start_ray(options: FleetOptions, host: str, port: int, address: str | None = None) -> None:
    """A Ray of our own, or the one at this address, and its Serve, which will listen there."""
    if address is None:
        _close_ray()
        ray.init(
            num_cpus=max(1, round(options.cpus * (_most(options) + 1))),
            include_dashboard=False,
            namespace=NAME,
        )
    else:
        ray.init(address=address, namespace=NAME)
    http = HTTPOptions(host=host, port=port, location=ProxyLocation.HeadOnly)
    serve.start(http_options=http, logging_config=QUIET)


def _close_ray() -> None:
    """Let only processes of this fleet use its Ray, which listens on all interfaces. Where the
    operator has set nothing else, Ray wants a token; its own would lie in a file that others may
    read."""
    if not any(
        name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _deployment(kind: type) -> Deployment:
    found: Deployment = serve.deployment(kind)  # type: ignore[assignment]  # it is typed as of a function
    return found


def _most(options: FleetOptions) -> int:
    """Servers at once, without the one more that is there while they are replaced."""
    return int((options.autoscaling or {}).get("max_replicas", options.replicas))


def _scaling(options: FleetOptions) -> dict[str, Any]:
    if options.autoscaling is None:
        return {"num_replicas": options.replicas}
    try:
        return {"autoscaling_config": AutoscalingConfig(**options.autoscaling)}
    except ValueError as error:
        raise ValueError(f"autoscaling {options.autoscaling}: {error}") from error


def _check_exposure(options: FleetOptions, host: str | None) -> None:
    """See `check_exposure`."""
    keys, is_single = Keys.of(_served(options)), "--kvgraft-single-tenant" in options.arguments
    check_exposure(keys.api_keys, host=host, uds=None, single_tenant=is_single)


def _served(options: FleetOptions) -> Namespace:
    """What the flags of a server say; ValueError if it would not start with them."""
    from kvgraft.vllm.server.arguments import parse

    return parse(options.command)


def _environment(options: FleetOptions) -> dict[str, str]:
    """What its servers get beside ours: on CPUs, several of them must not bind to the same
    cores."""
    if options.gpus or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, int(options.cpus))),
    }


def end_fleet(application: str, drain_s: float) -> None:
    """Have what is in flight end, cut what has not after so many seconds, and end all servers.

    While this lasts the fleet answers 503 to new requests. Ray still runs afterwards.
    """
    ingresses = serve.get_deployment_handle(INGRESS, application)
    asyncio.run(_end(ingresses, serve.get_deployment_handle(REPLICA, application), drain_s))
