"""The end of a fleet on one machine: nothing new is taken, what is in flight ends or is cut,
servers end."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle

from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.replica import INGRESS, REPLICA, STOP_S

FLUSH_S = 2.0  # in which clients are sent what is left, once servers have ended
CALL_S = 5.0  # beside what was asked for, until a process has answered


def end_fleet(application: str, drain_s: float) -> None:
    """Have what is in flight end, cut what has not after so many seconds, and end all servers.

    While this lasts the fleet answers 503 to new requests. Ray still runs afterwards.
    """
    ingresses = serve.get_deployment_handle(INGRESS, application)
    asyncio.run(_end(ingresses, serve.get_deployment_handle(REPLICA, application), drain_s))


async def _end(ingresses: DeploymentHandle, replicas: DeploymentHandle, drain_s: float) -> None:
    await ask_all(ingresses, "drain", drain_s, within_s=drain_s + CALL_S)

    # What is still in flight loses its server here: the ingress sends its clients an error.
    await ask_all(replicas, "end", within_s=STOP_S + CALL_S)
    await ask_all(ingresses, "drain", FLUSH_S, within_s=FLUSH_S + CALL_S)
