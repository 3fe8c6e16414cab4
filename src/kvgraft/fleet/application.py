"""Fleet as a Ray Serve application, started from a command line or a Ray configuration file."""

import asyncio
import os
import secrets
import signal
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.ingress import Ingress
from kvgraft.fleet.options import FleetAddress, FleetOptions
from kvgraft.fleet.replica import INGRESS, REPLICA, STOP_S, Replica
from kvgraft.fleet.router import SegmentRouter
from kvgraft.methods import check_options
from kvgraft.server.keys import ADMIN_KEY, API_KEY, Keys, check_exposure
from kvgraft.server.process import KVGRAFT
from kvgraft.store.secret import CACHE_SECRET

# time to send clients the last of their answers after the servers have ended
FLUSH_S = 2.0
# time for which an ingress that is replaced passes answers on, beyond the drain of one replica: its
# replicas may be replaced long after it, and each stream ends when its replica has been drained
INGRESS_S = 3600.0
# margin for a process to answer, in addition to the time that the call itself may take
CALL_S = 5.0


async def _end(ingresses: DeploymentHandle, replicas: DeploymentHandle, drain_s: float) -> None:
    """Drain the ingresses, end the replicas, then drain what the ended replicas left."""
    await ask_all(ingresses, "drain", drain_s, within_s=drain_s + CALL_S)

    # Requests that still run lose their server here; the ingress sends their clients an error.
    await ask_all(replicas, "end", within_s=STOP_S + CALL_S)
    await ask_all(ingresses, "drain", FLUSH_S, within_s=FLUSH_S + CALL_S)


NAME = "kvgraft"
# requests that one replica runs at most; vLLM has its own queue
IN_FLIGHT = 256
# the servers already log requests
QUIET = LoggingConfig(enable_access_log=False)


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for a Ray configuration file (`import_path:
    kvgraft.fleet.application:build`).

    Args:
        args: fields of `FleetOptions`.

    Raises:
        ValueError: a field is unknown, a flag cannot be served, or there are neither API keys nor
            --kvgraft-single-tenant. Keys are required because Ray's listening address is not known
            here.
    """
    check_options("a fleet", FleetOptions, args)
    options = FleetOptions(**args)
    _check_exposure(options, host=None)
    return application(options)


def application(options: FleetOptions) -> Application:
    """Return the application of these options, after a check of the servers' flags.

    Raises:
        ValueError: the flags cannot be served.
    """
    served = _served(options)
    names = served.served_model_name or [served.model]
    check = EnvironmentCheck.here(variables_to_compare(options))
    return assemble(options, Keys.of(served), names, check)


def assemble(
    options: FleetOptions,
    keys: Keys,
    names: Sequence[str],
    environment_check: EnvironmentCheck,
    program: Sequence[str] = KVGRAFT,
) -> Application:
    """Return the application of options that were checked.

    Args:
        keys: API keys and admin key of the servers.
        names: names under which the model is served.
        environment_check: check of the environment on each replica's machine.
        program: what Python runs for a server, see `running`.
    """
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
        graceful_shutdown_timeout_s=options.drain_s + INGRESS_S,
    )

    servers = replica.bind(options.command, _environment(options), environment_check, program)
    return ingress.bind(servers, keys, names, secrets.token_bytes(32))


def variables_to_compare(options: FleetOptions) -> list[str]:
    """Return the environment variables that must have the same value on all machines.

    A secret that is not set on this machine is not checked, because other machines may have it.
    """
    served = _served(options)
    flags = {API_KEY: served.api_key, ADMIN_KEY: getattr(served, "kvgraft_admin_key", None)}
    return [
        *(name for name, given in flags.items() if given is None),
        *({CACHE_SECRET} & os.environ.keys()),
    ]


def run(options: FleetOptions, at: FleetAddress) -> None:
    """Run `kvgraft fleet`.

    On one machine, serve until SIGTERM or Ctrl-C, then let running requests finish. On a Ray
    cluster, start the fleet, or replace the running one step by step, and return.

    Args:
        options, at: see `read_command`.

    Raises:
        ValueError: the options contradict each other, or no server has started.
        KeyboardInterrupt: a signal came before the fleet was up, or a second one during its drain.
            All that was started has ended.
    """
    _check_exposure(options, at.host)
    app = application(options)
    try:
        start_ray(options, at.host, at.port, at.address)
        for number in (signal.SIGTERM, signal.SIGINT) if at.address is None else ():
            signal.signal(number, _interrupt)
        _start(app)
        print(f"kvgraft fleet: http://{at.host}:{at.port}", flush=True)
        if at.address is None:
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
            # a second signal ends this at once
            end_fleet(NAME, options.drain_s)
    # the handler that Ray sets for SIGTERM while it starts
    except SystemExit as stop:
        raise KeyboardInterrupt from stop
    finally:
        if at.address is None:
            # ends every process of this Ray, including the one that listens
            ray.shutdown()


def _start(app: Application) -> None:
    """Deploy the application and wait until it is ready.

    Raises:
        ValueError: the fleet has not started.
    """
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the fleet has not started, see what its servers say: {error}") from error


def _interrupt(*_: object) -> None:
    """Handle a signal as Ctrl-C."""
    raise KeyboardInterrupt


def start_ray(options: FleetOptions, host: str, port: int, address: str | None = None) -> None:
    """Start Ray, or connect to the cluster at `address`, then start its HTTP server."""
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
    """Require a token on Ray's ports, which listen on all interfaces, so that only this fleet uses
    them.

    The token is new at each start. If the operator has configured Ray's authentication, nothing
    changes. Ray's own token would be in a file that other users may read.
    """
    if not any(
        name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _deployment(kind: type) -> Deployment:
    """Return the Ray Serve deployment of a class."""
    # Ray's type stubs describe a function here
    found: Deployment = serve.deployment(kind)  # type: ignore[assignment]
    return found


def _most(options: FleetOptions) -> int:
    """Return the maximum number of replicas, without the extra one during a replacement."""
    return int((options.autoscaling or {}).get("max_replicas", options.replicas))


def _scaling(options: FleetOptions) -> dict[str, Any]:
    """Return the deployment's options for the number of replicas.

    Raises:
        ValueError: Ray Serve does not accept the autoscaling configuration.
    """
    if options.autoscaling is None:
        return {"num_replicas": options.replicas}
    try:
        return {"autoscaling_config": AutoscalingConfig(**options.autoscaling)}
    except ValueError as error:
        raise ValueError(f"autoscaling {options.autoscaling}: {error}") from error


def _check_exposure(options: FleetOptions, host: str | None) -> None:
    """Apply `check_exposure` to the fleet's listening address; None: any interface."""
    keys, is_single = Keys.of(_served(options)), "--kvgraft-single-tenant" in options.arguments
    check_exposure(keys.api_keys, host=host, uds=None, single_tenant=is_single)


def _served(options: FleetOptions) -> Namespace:
    """Return the parsed arguments of one server.

    Raises:
        ValueError: a server would not start with them.
    """
    from kvgraft.server.arguments import parse

    return parse(options.command)


def _environment(options: FleetOptions) -> dict[str, str]:
    """Return the variables to add to the servers' environment.

    On CPUs, several servers must not bind their threads to the same cores.
    """
    if options.gpus or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, int(options.cpus))),
    }


def end_fleet(application: str, drain_s: float) -> None:
    """Drain the fleet for `drain_s` seconds, cut off requests that still run, and end all servers.

    During the drain new requests get a 503. Ray itself keeps running.
    """
    ingresses = serve.get_deployment_handle(INGRESS, application)
    asyncio.run(_end(ingresses, serve.get_deployment_handle(REPLICA, application), drain_s))
