"""Gate to the engine: every request that leaves the API server carries its tenant's cache key."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from kvgraft.server.call import CURRENT, Call
from kvgraft.server.engine_choice import EngineChoice, PromptText
from kvgraft.server.guarding import ServerGuard, exact
from kvgraft.server.request_log import Entry, RequestLog
from kvgraft.server.sharing import SHARED, Grants
from kvgraft.server.tenancy import Principal, Salts, Tenant
from kvgraft.vllm.namespace_grants import GRANTED, granted_params
from kvgraft.vllm.options import EXACT_BECAUSE, KEY, PARAMS, Control, RequestOptions
from kvgraft.vllm.patches.forced_tokens import check_forced_output
from kvgraft.vllm.patches.reports import StoppedReports

# error text of vLLM's scheduler
NOT_RESET = "Failed to reset KV cache even when all the running requests are preempted"
# characters; the error may repeat text that the client sent
MAX_MESSAGE = 300


def parse_params(params: Any, default: RequestOptions) -> RequestOptions:
    """Return the options in a request's `kv_transfer_params`.

    Raises:
        ValueError: a field does not exist or a value is not allowed; the message names it.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"{PARAMS} must be an object, got {type(params).__name__}")
    for key in params.keys() - {KEY}:
        raise ValueError(_cut(f"{PARAMS} has no field {key!r} here: allowed is {KEY}"))
    given = params.get(KEY, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{PARAMS}.{KEY} must be an object, got {type(given).__name__}")
    try:
        # fail here if the options cannot be encoded for the engine
        msgspec.msgpack.encode(given)
        return RequestOptions.parse(given, default)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(_cut(f"{PARAMS}.{KEY}: {error}")) from error


def _cut(message: str) -> str:
    """Return a message of at most `MAX_MESSAGE` characters, with a mark where it was cut."""
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"


class TenantEngineClient:
    """Wrapper of vLLM's engine client that sets cache keys, checks options and logs requests.

    It replaces methods on vLLM's own instance, so no route can reach the engine without it.

    Args:
        client: vLLM's `AsyncLLM`. Three of its methods are replaced on this instance, one of its
            engine core client, and one of its output processor.
        choice: choice of the engine for each request, if there are several.

    Attributes:
        before_request: awaited before a request enters the engine, except low-priority requests.
        guard: the quality guard, or None.
        exact_for: kinds of requests that get exact KV.
        num_waiting: requests that wait for their first token, without low-priority requests.
    """

    def __init__(
        self,
        client: Any,
        salts: Salts,
        grants: Grants,
        request_log: RequestLog,
        default: RequestOptions,
        choice: EngineChoice | None = None,
    ) -> None:
        self._salts, self._grants, self._request_log, self._default = (
            salts,
            grants,
            request_log,
            default,
        )
        self.before_request: Callable[[], Awaitable[None]] = _nothing
        self.guard: ServerGuard | None = None
        self.exact_for: frozenset[str] = frozenset()
        self.num_waiting = 0

        self._client, self._choice = client, choice
        self._generate, client.generate = client.generate, self.generate
        self._reset, client.reset_prefix_cache = client.reset_prefix_cache, self.reset_prefix_cache
        self._add_lora, client.add_lora = client.add_lora, self.add_lora
        # kept by the output processor
        StoppedReports(client.output_processor)
        self._admit, client.engine_core.add_request_async = (
            client.engine_core.add_request_async,
            self.admit,
        )

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Check the request's options, then call vLLM's `generate`.

        Raises:
            VLLMValidationError: `parse_params` does not allow the request's `kv_transfer_params`.
            NotGranted: they name a shared namespace that is not granted to the caller.
        """
        params, call, options = _params_of(sampling_params), CURRENT.get(), self._default

        if params is not None:
            try:
                options = parse_params(params, self._default)
                if options.forced_output:
                    check_forced_output(
                        options.forced_output, sampling_params, self._client.vllm_config
                    )
                if call is not None:
                    self._grants.names_for(call.principal.tenant, options.shared)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter=f"{PARAMS}.{KEY}") from error

        if call is None:
            return self._generate(prompt, sampling_params, request_id, *args, **kwargs)

        watched = None
        if isinstance(sampling_params, SamplingParams) and options.is_approximate:
            if call.kinds_of(sampling_params) & self.exact_for:
                sampling_params = exact(sampling_params, "exact_for")
            elif self.guard is not None:
                sampling_params, watched = self.guard.begin(call, sampling_params, options)

        call.reports.append(None)
        call.cached.append(0)
        outputs = self._generate(prompt, sampling_params, request_id, *args, **kwargs)
        if watched is not None:
            call.watched[request_id] = watched
        return self._watch(call, len(call.reports) - 1, outputs, request_id)

    async def admit(self, request: Any) -> None:
        """Set the cache key of an `EngineCoreRequest`, add its grants, choose its engine, and send
        it there."""
        call, salts = CURRENT.get(), list[str]()
        if call is None or not call.low_priority:
            await self.before_request()

        if call is None:
            request.cache_salt = self._salts.nobody()
        elif call.salt is not None:
            request.cache_salt = call.salt
        else:
            given = (_params_of(request.sampling_params) or {}).get(KEY) or {}
            request.cache_salt = self._salts.of(
                call.principal.tenant, given.get("namespace", ""), request.cache_salt
            )
            names = self._grants.names_for(call.principal.tenant, given.get("shared"))
            salts = [self._salts.of(SHARED, name) for name in names]
            _share(request, salts)
        await self._choose_engine(request, call, salts)

        name = getattr(request, "external_req_id", None) or request.request_id
        if call is not None and (watched := call.watched.get(name)) is not None:
            watched.cache_salt, watched.request_id = request.cache_salt, request.request_id
            watched.lora_request = request.lora_request
            watched.engine = request.data_parallel_rank

        await self._admit(request)

    async def _choose_engine(self, request: Any, call: Call | None, shared: list[str]) -> None:
        """Set the engine of a request, if there are several.

        Args:
            shared: cache keys of the shared namespaces that it may graft from.
        """
        if call is not None and call.engine is not None:
            request.data_parallel_rank = call.engine
        # requests of the server itself give way, and their text is that of others
        if self._choice is None or (call is not None and call.low_priority):
            return

        adapter = request.lora_request
        text = await PromptText.of(
            request.prompt_token_ids or (),
            [request.cache_salt, *shared],
            "" if adapter is None else adapter.lora_name,
            grafts=request.data_parallel_rank is None and self._may_graft(request),
        )
        request.data_parallel_rank = self._choice.choose(
            request.request_id, text, request.data_parallel_rank
        )

    def _may_graft(self, request: Any) -> bool:
        """Return whether a request may use approximate KV."""
        params = _params_of(request.sampling_params) or {}
        if request.sampling_params is None or EXACT_BECAUSE in params:
            return False
        return RequestOptions.parse(params.get(KEY) or {}, self._default).is_approximate

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the guard's waiting answers, then call vLLM's `reset_prefix_cache`.

        Returns:
            False also if a prompt is being recovered. vLLM preempts all running requests, cannot
            preempt that one, and raises an error.
        """
        await self.before_request()
        if self.guard is not None:
            await self.guard.reset()

        try:
            is_reset = bool(await self._reset(*args, **kwargs))
            if self._choice is not None and is_reset:
                self._choice.clear()
            return is_reset
        except Exception as error:
            if NOT_RESET not in str(error):
                raise
            return False

    async def add_lora(self, lora_request: Any) -> bool:
        """Call vLLM's `add_lora`.

        If an adapter's weights are replaced, the guard drops its waiting answers, which may be of
        the old weights.
        """
        if lora_request.load_inplace and self.guard is not None:
            await self.guard.reset()
        return bool(await self._add_lora(lora_request))

    @property
    def engines(self) -> range:
        """Indices of the engines."""
        return range(1 if self._choice is None else self._choice.num_engines)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is in flight."""
        return not self._client.output_processor.has_unfinished_requests()

    async def abort(self, request_id: str) -> None:
        """Abort a request of `operate`, if it is still running."""
        await self._client.abort(request_id)

    async def abort_all(self) -> None:
        """Abort all requests of all clients."""
        await self._client.abort([*self._client.output_processor.request_states], internal=True)

    async def control(
        self,
        tenant: Tenant,
        namespace: str,
        control: Control,
        token_ids: list[int],
        lora_request: Any = None,
        engine: int = 0,
    ) -> dict[str, Any]:
        """Run an operation on the pinned documents of one namespace in one engine.

        Args:
            token_ids: the text to pin; operations other than `pin` ignore it.
            lora_request: vLLM's LoRA request of the adapter with which the text is computed, or
                None.

        Returns:
            The engine's answer, see `PinControls.apply`; empty if the engine does not use KVGraft's
            connector.

        Raises:
            VLLMValidationError: the text is longer than the model allows.
        """
        call = Call(
            Principal(tenant, is_admin=True),
            "",
            self._salts.of(tenant, namespace),
            lora_request,
            engine=engine,
        )
        return await self.operate(
            call, control, token_ids, f"kvgraft-{control.op}-{self._salts.nobody()[:16]}"
        )

    async def operate(
        self, call: Call, control: Control, token_ids: list[int], request_id: str
    ) -> dict[str, Any]:
        """Run a control operation as a request.

        Returns:
            The engine's answer; empty if the request was aborted, or if the engine does not use
            KVGraft's connector.

        Raises:
            VLLMValidationError: the prompt is longer than the model allows.
        """
        output = await self.run(call, control.as_params(), token_ids, request_id)
        return (output.kv_transfer_params or {}).get(KEY) or {} if output is not None else {}

    async def run(
        self,
        call: Call,
        params: dict[str, Any],
        token_ids: list[int],
        request_id: str,
        **sampling: Any,
    ) -> Any | None:
        """Run an internal request with these `kv_transfer_params` and sampling parameters.

        Returns:
            vLLM's last output, or None if the request was aborted.

        Raises:
            VLLMValidationError: the prompt is longer than the model allows.
        """
        sampling_params = SamplingParams(
            **{"max_tokens": 1, **sampling},
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={PARAMS: params},
        )

        before, last = CURRENT.set(call), None
        try:
            prompt, lora = tokens_input(token_ids), call.lora_request
            async with aclosing(
                self._generate(prompt, sampling_params, request_id, lora_request=lora)
            ) as outputs:
                async for output in outputs:
                    last = output
            return last
        finally:
            CURRENT.reset(before)

    async def _watch(
        self, call: Call, slot: int, outputs: AsyncGenerator[Any, None], request_id: str
    ) -> AsyncGenerator[Any, None]:
        """Pass outputs on, and record the report of the last one before the caller gets it."""
        last, waits, watched = None, True, call.watched.get(request_id)

        self.num_waiting += 1
        try:
            async with aclosing(outputs):
                await self.before_request()
                async for output in outputs:
                    self.num_waiting, waits = self.num_waiting - waits, False
                    call.cached[slot] = output.num_cached_tokens or call.cached[slot]
                    if watched is not None:
                        watched.take(output)
                    if output.finished:
                        last = output
                        report = call.reports[slot] = (output.kv_transfer_params or {}).get(KEY)
                        if watched is not None and self.guard is not None:
                            self.guard.end(watched, report)
                    yield output
        except (VLLMClientError, GracefulHTTPError):
            # do not log a request that was refused before it ran
            raise
        except BaseException:
            self._request_log.add(Entry.of(call.principal.tenant, call.route, last))
            raise
        else:
            scored = {} if watched is None else watched.found
            self._request_log.add(Entry.of(call.principal.tenant, call.route, last, scored))
        finally:
            self.num_waiting -= waits


def _share(request: Any, salts: Sequence[str]) -> None:
    """Allow a request to graft from the namespaces with these cache keys."""
    # requests without sampling parameters never graft
    if salts and request.sampling_params is not None:
        granted = {GRANTED: granted_params(request.cache_salt, salts)}
        params, extra = (
            _params_of(request.sampling_params) or {},
            request.sampling_params.extra_args or {},
        )
        request.sampling_params.extra_args = {**extra, PARAMS: {**params, **granted}}


async def _nothing() -> None:
    """Do nothing: the default of `before_request`."""


def _params_of(sampling_params: Any) -> Any:
    """Return the `kv_transfer_params` in the sampling parameters' extra arguments, or None."""
    return (getattr(sampling_params, "extra_args", None) or {}).get(PARAMS)
