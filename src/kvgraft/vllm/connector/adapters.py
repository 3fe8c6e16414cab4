"""Which weights the adapters of requests have: a name, a path and even vLLM's id stay when others
are loaded."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig

from kvgraft.vllm.compat import salt_hashes
from kvgraft.vllm.compat.adapters import Adapter, adapter_digest
from kvgraft.vllm.connector.request_state import RequestState


class RequestAdapters:
    """What the files of an adapter are when a request arrives, unless workers have said that they
    loaded others.

    vLLM knows the blocks of an adapter by its name and path. Where those have got other weights,
    requests get other block hashes as well, so that no exact lookup finds what was computed under
    the earlier ones."""

    def __init__(self, config: VllmConfig) -> None:
        lora = config.lora_config
        self._how = "" if lora is None else f"{lora.lora_dtype}/{sorted(lora.target_modules or ())}"
        self._loaded: dict[int, str] = {}  # digests by vLLM's ids
        # digests that vLLM's own hashes stand for, by name and path
        self._plain: dict[tuple[str, str], str] = {}

    def of(self, request: Any) -> Adapter | None:
        """The adapter of a request that has just arrived; None: it is for the model itself. The
        digest is empty if nobody knows it: then the request must neither reuse nor leave
        anything."""
        lora = request.lora_request
        if lora is None:
            return None
        loaded = None if lora.load_inplace else self._loaded.get(lora.lora_int_id)
        digest = loaded or adapter_digest(lora)
        if digest is None or digest != self._plain.setdefault(
            (lora.lora_name, lora.lora_path), digest
        ):
            salt_hashes(request, digest or os.urandom(32).hex())
        return Adapter(lora, digest or "")

    def scoped(self, model: str, adapter: Adapter | None) -> str:
        """The identity of a model under an adapter."""
        return model if adapter is None else f"{model}/lora:{self._how}/{adapter.digest}"

    def learn(self, loaded: Mapping[int, str], states: Iterable[RequestState]) -> None:
        """Workers have loaded adapters. Requests that were to have other weights leave nothing
        behind from now on."""
        self._loaded |= loaded
        for state in states:
            if state.adapter is None or (lora := state.adapter.request).lora_int_id not in loaded:
                continue
            digest = loaded[lora.lora_int_id]
            self._plain[lora.lora_name, lora.lora_path] = digest
            if state.adapter.digest != digest:
                state.adapter, state.recovery_key = Adapter(lora, ""), None
                state.refusal = state.refusal or "lora"
