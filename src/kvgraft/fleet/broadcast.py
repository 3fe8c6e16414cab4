"""What is asked of all replicas of a deployment at once."""

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def ask_all(
    replicas: DeploymentHandle, method: str, *args: Any, within_s: float
) -> list[Any]:
    """What each replica answers, or an exception: TimeoutError of one that has not in so many
    seconds. Nothing where there is no replica."""
    deadline = asyncio.get_running_loop().time() + within_s

    async def answer_of(asked: Any) -> Any:
        async with asyncio.timeout_at(deadline):
            return await asked.get_async()

    try:
        async with asyncio.timeout_at(deadline):
            # Ray's `results_async` has no answer at all if one replica gives none in time
            asked = await replicas.broadcast(method, *args)._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return await asyncio.gather(*map(answer_of, asked), return_exceptions=True)
