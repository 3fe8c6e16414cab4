"""Checks of requests: the reuse options, the adapter, and reasons to refuse reuse."""

import logging
import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

from vllm.config import VllmConfig

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.report import REFUSALS
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.compat.adapters import Adapter, adapter_digest
from kvgraft.vllm.compat.families import is_by_head, is_plain
from kvgraft.vllm.compat.head_maps import find_head_map, works_by_head
from kvgraft.vllm.compat.support import model_identity
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.namespace_grants import GRANTED, granted_salts
from kvgraft.vllm.options import EXACT_BECAUSE, KEY, TRIAL_OF, Control, RequestOptions
from kvgraft.vllm.patches.forced_tokens import check_forced_output
from kvgraft.vllm.patches.requests import hide_answer, salt_hashes
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.sparse.program import program_of

logger = logging.getLogger("kvgraft")


class RequestAdapters:
    """LoRA adapters of requests, identified by a digest of their weights.

    The digest covers the adapter's files when a request arrives, unless a worker has reported that
    it loaded other weights. vLLM identifies the blocks of an adapter by name and path only. If the
    weights under them change, requests get salted block hashes. So no exact lookup finds blocks of
    the earlier weights.
    """

    def __init__(self, config: VllmConfig) -> None:
        lora = config.lora_config
        self._how = "" if lora is None else f"{lora.lora_dtype}/{sorted(lora.target_modules or ())}"
        # digests by vLLM's adapter ids
        self._loaded: dict[int, str] = {}
        # digests that unsalted block hashes stand for, by name and path
        self._plain: dict[tuple[str, str], str] = {}

    def of(self, request: Any) -> Adapter | None:
        """Return the adapter of a request that has just arrived; None if it uses the base model.

        The digest is empty if the weights are unknown. Then the request must neither reuse nor
        leave KV.
        """
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
        """Return the identity of a model with this adapter."""
        return model if adapter is None else f"{model}/lora:{self._how}/{adapter.digest}"

    def learn(self, loaded: Mapping[int, str], states: Iterable[RequestState]) -> None:
        """Record adapters that workers have loaded.

        Requests that expected other weights stop reusing, and leave nothing behind.

        Args:
            loaded: digests by vLLM's adapter ids.
        """
        self._loaded |= loaded
        for state in states:
            if state.adapter is None or (lora := state.adapter.request).lora_int_id not in loaded:
                continue
            digest = loaded[lora.lora_int_id]
            self._plain[lora.lora_name, lora.lora_path] = digest
            if state.adapter.digest != digest:
                state.adapter, state.recovery_key = Adapter(lora, ""), None
                state.refusal = state.refusal or "lora"


class ReuseEligibility:
    """Parse the options of requests and decide if they may reuse KV.

    Args:
        default: options of requests that name none.
        config: vLLM's configuration.
        residual_layers: layers whose residual stream is kept.
        has_head_map: True if the classes of the model's KV heads are known.
    """

    def __init__(
        self,
        default: RequestOptions,
        config: VllmConfig,
        residual_layers: Set[int],
        *,
        has_head_map: bool,
    ) -> None:
        self._default = default
        self._config = config
        self._num_layers = config.model_config.get_num_layers(config.parallel_config)
        self._residual_layers = residual_layers
        self._takes_documents = is_plain(config) and not is_by_head(config)
        self._works_by_head = works_by_head(config)
        self._has_head_map = has_head_map

    def of(
        self, request: Any, *, weights_known: bool = True
    ) -> tuple[RequestOptions | Control, str | None, tuple[str, ...]]:
        """Parse the options of a request and check if it may graft.

        Args:
            weights_known: False if the weights of its adapter are unknown.

        Returns:
            The options or control operation; the reason why it must not graft, or None; and the
            cache keys of the shared namespaces that it may graft from. Invalid parameters are such
            a reason.
        """
        try:
            params = request.kv_transfer_params or {}
            given = params.get(KEY, {})
            if "control" in given:
                return Control.parse(given["control"]), "control", ()
            options = RequestOptions.parse(given, self._default)
            check_forced_output(options.forced_output, request.sampling_params, self._config)
            salts = granted_salts(params.get(GRANTED), request.cache_salt or "")
            if len(salts) < len(options.shared or ()):
                raise ValueError("shared namespaces are granted by `kvgraft serve` only")
        except (ValueError, TypeError, AttributeError) as error:
            logger.warning("request %s is served without reuse: %s", request.request_id, error)
            return self._default, "invalid_params", ()

        if (because := params.get(EXACT_BECAUSE)) in REFUSALS:
            return options, because, ()
        if not weights_known:
            return options, "lora", ()

        missing = set(options.policy.residual_layers(self._num_layers)) - self._residual_layers
        return options, "residual_stream" if missing else self._refusal(request, options), salts

    def _refusal(self, request: Any, options: RequestOptions) -> str | None:
        """Return the reason why a request must not graft, or None."""
        keeps, by_head = isinstance(options.policy, KeepsDocuments), options.policy.needs_head_map
        sampling = request.sampling_params
        penalty = 1.0 if sampling is None else sampling.repetition_penalty
        checks = {
            # first: what token ids do not say must not come from the store either
            "multimodal": bool(request.mm_features),
            "prompt_embeds": request.prompt_embeds is not None,
            "off": not options.reuse,
            "policy_full": not (options.policy.uses_grafts or keeps),
            "unsupported_model": (keeps and not self._takes_documents)
            or (by_head and not self._works_by_head),
            "no_head_map": by_head and not self._has_head_map,
            # The penalty counts tokens of the whole prompt, and vLLM sees a truncated one.
            "repetition_penalty": keeps and penalty != 1.0,
            "prompt_logprobs": request.skip_reading_prefix_cache,
            "pooling": request.pooling_params is not None,
            "streaming_session": request.resumable,
        }

        return next((reason for reason, applies in checks.items() if applies), None)


class RequestIntake:
    """Make the states of arriving requests: scope, options, and whether they may reuse KV."""

    def __init__(self, config: VllmConfig, settings: KVGraftSettings) -> None:
        self.config = config
        self.adapters = RequestAdapters(config)
        self._model = model_identity(config, lasting=settings.store is not None)
        self._flow = program_of(config)
        self._block_size = int(config.cache_config.block_size)
        num_layers = config.model_config.get_num_layers(config.parallel_config)
        self.eligibility = ReuseEligibility(
            settings.default,
            config,
            settings.kept_residual_layers(num_layers),
            has_head_map=find_head_map(config) is not None,
        )

    def make_state(self, request: Any) -> RequestState:
        """Make the state of a request.

        A request with invalid parameters is served without reuse.
        """
        adapter = self.adapters.of(request)
        model = self.adapters.scoped(self._model, adapter)
        options, refusal, salts = self.eligibility.of(
            request, weights_known=adapter is None or bool(adapter.digest)
        )
        state = RequestState(
            request,
            options,
            BlockProvenance(scope_digest(model, request.cache_salt or "")),
            adapter,
            refusal,
            tuple(scope_digest(model, salt) for salt in salts),
            is_trial=(request.kv_transfer_params or {}).get(TRIAL_OF) is not None,
        )

        most = request.num_prompt_tokens + request.max_tokens
        follows = self._flow is not None and self._flow.reaches(most)
        if refusal is None and isinstance(options, RequestOptions):
            policy = str(options.policy)
            state.recovery_key = policy, options.match_similar, follows, state.shared

        # A flow makes the KV of generated tokens approximate.
        if follows:
            state.provenance.num_exact = request.num_prompt_tokens
            state.provenance.reset()
            hide_answer(request, self._block_size)

        return state

    def change_model(self) -> None:
        """Give the model another identity, which hides everything stored so far."""
        self._model += f"/{os.urandom(8).hex()}"
