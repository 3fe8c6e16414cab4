"""Call of a method on all replicas of a Ray Serve deployment at once."""

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def ask_all(
    replicas: DeploymentHandle, method: str, *args: Any, within_s: float
) -> list[Any]:
    """Call a method on all replicas and return their answers.

    Returns:
        One answer or exception per replica; TimeoutError of a replica that does not answer within
        `within_s` seconds. Empty if there is no replica.
    """
    deadline = asyncio.get_running_loop().time() + within_s

    async def answer_of(asked: Any) -> Any:
        """Return one replica's answer, until the deadline."""
        async with asyncio.timeout_at(deadline):
            return await asked.get_async()

    try:
        async with asyncio.timeout_at(deadline):
            # Ray's `results_async` returns no answer if one replica does not answer in time
            asked = await replicas.broadcast(method, *args)._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return await asyncio.gather(*map(answer_of, asked), return_exceptions=True)
