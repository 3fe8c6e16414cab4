"""Forced answers: each token is what the request names, and log-probabilities are the model's.

These are vLLM's logits processors, for both of its model runners. Our worker adds them to its
runner. If vLLM's configuration named them, the first runner would wait in every step for the tokens
of the last one, even without such requests.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from kvgraft.vllm.options import KEY
from kvgraft.vllm.request_fields import RequestFields

logger = logging.getLogger("kvgraft")
RAW = "raw_logprobs"


def check_forced_output(
    answer: tuple[int, ...], params: SamplingParams, config: VllmConfig
) -> None:
    """Raise ValueError unless a request with these parameters can have this forced answer."""
    if not answer:
        return

    vocabulary, mode = config.model_config.get_vocab_size(), config.model_config.logprobs_mode
    if max(answer) >= vocabulary:
        raise ValueError(f"forced_output must hold token ids below {vocabulary}, got {max(answer)}")
    if params.max_tokens is not None and len(answer) > params.max_tokens:
        raise ValueError(
            f"forced_output has {len(answer)} tokens, but max_tokens is {params.max_tokens}"
        )

    wrong = {
        "speculative decoding, whose drafts would stand in it": config.speculative_config
        is not None,
        "structured outputs, which may allow other tokens only": params.structured_outputs
        is not None,
        "a budget of thinking tokens, which puts in others": params.thinking_token_budget
        is not None,
        f"--logprobs-mode {mode}, which tells of the tokens given": params.logprobs is not None
        and mode != RAW,
    }
    if reasons := [reason for reason, applies in wrong.items() if applies]:
        raise ValueError(f"forced_output does not go with {'; '.join(reasons)}")


class BatchAnswers(AdapterLogitsProcessor):
    """Logits processor for the first model runner, whose requests have rows in a batch."""

    def __init__(self, config: VllmConfig, device: Any) -> None:
        super().__init__(config, device, False)
        self._config = config

    def is_argmax_invariant(self) -> bool:
        """Return False, since greedy requests need the processor too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Return the processor of one request, or None without a forced answer.

        It is called with the tokens of the answer so far, which may be placeholders, and logits
        [V].
        """
        answer = _answer_of(params, self._config)
        return partial(_next, answer) if answer else None


class SlotAnswers(LogitsProcessor):
    """Logits processor for the second model runner, whose requests have slots."""

    def __init__(self, config: VllmConfig, req_states: Any) -> None:
        self._config, self._num_prompt = config, req_states.prompt_len.np
        self._answers: dict[int, tuple[int, ...]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Return True if the request in this slot has a forced answer."""
        self._answers.pop(req_idx, None)
        if answer := _answer_of(sampling_params, self._config):
            self._answers[req_idx] = answer
        return bool(answer)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Force the next tokens in logits [requests, V], in place."""
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            place = int(ctx.seq_lens_upper_bound_np[row]) - int(self._num_prompt[slot])
            # A negative place means that more of the prompt is still to come.
            if place >= 0:
                _force(self._answers.get(slot, ()), place, logits[row])
        return logits


def add_forced_tokens(runner: Any) -> None:
    """Add the logits processor to a model runner whose cache is set up."""
    if runner.vllm_config.use_v2_model_runner:
        _add_to_slots(runner)
    else:
        _add_to_batch(runner)


def _add_to_batch(runner: Any) -> None:
    processors = runner.input_batch.logitsprocs
    processors.non_argmax_invariant.append(BatchAnswers(runner.vllm_config, runner.device))


def _add_to_slots(runner: Any) -> None:
    runner.sampler.logits_processors.append(SlotAnswers(runner.vllm_config, runner.req_states))


def _answer_of(params: SamplingParams, config: VllmConfig) -> tuple[int, ...]:
    """Return the forced answer of a request; empty if there is none.

    The API server refuses answers that cannot be forced. Elsewhere the model answers such a
    request.
    """
    said = ((params.extra_args or {}).get("kv_transfer_params") or {}).get(KEY)
    if not isinstance(said, Mapping):
        return ()
    try:
        answer = tuple(RequestFields(forced_output=said.get("forced_output")).forced_output or ())
        check_forced_output(answer, params, config)
        return answer
    except ValueError as error:
        logger.warning("a request is answered by the model: %s", error)
        return ()


def _next(answer: tuple[int, ...], so_far: list[int], logits: Tensor) -> Tensor:
    _force(answer, len(so_far), logits)
    return logits


def _force(answer: tuple[int, ...], place: int, logits: Tensor) -> None:
    """Leave only the answer's token at this place in logits [V], up to the answer's end."""
    if place < len(answer):
        logits.fill_(float("-inf"))
        logits[answer[place]] = 0.0
