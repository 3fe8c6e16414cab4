"""What a request wants of reuse, and why it must not have it."""

import logging
from collections.abc import Set
from typing import Any

from vllm.config import VllmConfig

from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.report import REFUSALS
from kvgraft.vllm.compat.families import is_by_head, is_plain
from kvgraft.vllm.compat.forced_tokens import check_forced_output
from kvgraft.vllm.compat.head_maps import works_by_head
from kvgraft.vllm.namespace_grants import GRANTED, granted_salts
from kvgraft.vllm.options import EXACT_BECAUSE, KEY, Control, RequestOptions

logger = logging.getLogger("kvgraft")


class ReuseEligibility:
    """Reads requests.

    Args:
        default: what those get that say nothing.
        config: vLLM's.
        residual_layers: layers of which the residual stream is kept.
        has_head_map: whether the classes of the model's KV heads are known.
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
        """Options; if it must not graft, the reason (wrong parameters are one, too); and the cache
        keys of the shared namespaces that it may graft from."""
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
        """Why a request must not graft, or None."""
        keeps, by_head = isinstance(options.policy, KeepsDocuments), options.policy.needs_head_map
        sampling = request.sampling_params
        penalty = 1.0 if sampling is None else sampling.repetition_penalty
        checks = {
            "off": not options.reuse,
            "policy_full": not (options.policy.uses_grafts or keeps),
            "unsupported_model": (keeps and not self._takes_documents)
            or (by_head and not self._works_by_head),
            "no_head_map": by_head and not self._has_head_map,
            "repetition_penalty": keeps and penalty != 1.0,  # of the prompt
            "multimodal": bool(request.mm_features),
            "prompt_embeds": request.prompt_embeds is not None,
            "prompt_logprobs": request.skip_reading_prefix_cache,
            "pooling": request.pooling_params is not None,
            "streaming_session": request.resumable,
        }
        return next((reason for reason, applies in checks.items() if applies), None)
