"""Small vLLM engines for the tests, and what they are asked."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.config
from PIL import Image

from models import VOCAB_SIZE

# else Python files alone: `make contract`
HAS_KERNELS = any(Path(vllm.config.__file__).parents[1].glob("*.so"))
BLOCK = 32
NUM_BLOCKS = 95  # that requests can have; vLLM keeps one more, its null block
MAX_LENGTH = 2048  # tokens of a request
# that vLLM computes in a step: prompts are prefilled, and recovered, over several steps
STEP_TOKENS = 256
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",  # tiny layers: threads would only wait for each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# as in a server: it steps on after the last answer
ALONE = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_RANKS = ALONE | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each
OFF = {"reuse": "off"}
NAIVE = {"policy": "naive"}
# recomputes every grafted token: the answer must be exact
EVERYTHING = {"policy": "sparsex", "recompute_share": 1.0}
EVERY_HEAD = {"policy": "redknot:mass_share=1.0,windows=off,reuse=off"}  # likewise, head by head


def words(number: int, seed: int) -> list[int]:
    """Random ordinary tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE - 3, number).tolist()


@dataclass(frozen=True)
class Ask:
    """A greedy request. `options` is what it says under `kv_transfer_params.kvgraft`; salt is its
    namespace. `logprobs`: whether those of the generated tokens are wanted, `prompt_logprobs`:
    those of the prompt. `adapter`: the fields of vLLM's `LoRARequest`. `image`: the colour of an
    image, which a token of the prompt stands for."""

    prompt: Sequence[int]
    options: dict[str, Any] | None = None
    salt: str | None = None
    max_tokens: int = 8
    logprobs: bool = False
    prompt_logprobs: bool = False
    adapter: dict[str, Any] | None = None
    image: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Answer:
    """What came back: generated tokens, cached tokens of the prompt, our report (empty from plain
    vLLM), and what was asked for of logprobs, one for each token (of the prompt: but the first)."""

    tokens: list[int]
    cached: int
    report: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def grafted(self) -> int:
        """Tokens that were grafted."""
        return int(self.report["grafted_tokens"])


def start_engine(
    model: Path, *, with_kvgraft: bool, heads_together: bool = False, **settings: Any
) -> Any:
    """vLLM's `LLM` in float32, in this process. With `heads_together` our kernel serves all heads
    of a model by head, as it does where it is Triton."""
    os.environ |= ENVIRONMENT
    set_num_threads = torch.set_num_threads
    set_num_threads(1)
    from vllm import LLM

    if heads_together:
        from kvgraft.vllm.heads import attention

        attention.has_triton = lambda device: True

    if with_kvgraft:
        from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

        settings |= {
            "worker_cls": WORKER_CLASS,
            "kv_transfer_config": transfer_config(costs="tokens"),
        }
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": NUM_BLOCKS + 1,
        "kv_cache_memory_bytes": 1 << 26,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    engine = LLM(str(model), **defaults | settings)
    torch.set_num_threads = set_num_threads  # vLLM disables it for the whole process
    if heads_together:
        layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        by_head = [layer for layer in layers if isinstance(layer, attention.HeadAttention)]
        assert by_head
        assert not any(layer.apart for layer in by_head)
    return engine


def as_prompt(ask: Ask) -> dict[str, Any]:
    """What vLLM takes as a prompt."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
    if ask.salt:
        prompt["cache_salt"] = ask.salt
    if ask.image:
        prompt["multi_modal_data"] = {"image": Image.new("RGB", (28, 28), ask.image)}
    return prompt


def as_lora(ask: Ask) -> Any:
    """vLLM's `LoRARequest`, or None."""
    from vllm.lora.request import LoRARequest

    return None if ask.adapter is None else LoRARequest(**ask.adapter)


def as_sampling(ask: Ask, **fields: Any) -> Any:
    """vLLM's `SamplingParams`."""
    from vllm import SamplingParams

    extra = None if ask.options is None else {"kv_transfer_params": {"kvgraft": ask.options}}
    settings = {
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "extra_args": extra,
    }
    wanted = dict.fromkeys(
        [name for name in ("logprobs", "prompt_logprobs") if getattr(ask, name)], 0
    )
    return SamplingParams(**settings | wanted | fields)


def as_answer(output: Any) -> Answer:
    """From vLLM's `RequestOutput`."""
    report = (output.kv_transfer_params or {}).get("kvgraft", {})
    tokens, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs or []
    logprobs = [step[token].logprob for token, step in zip(tokens, steps, strict=False)]
    places = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
    of_prompt = [step[token].logprob for token, step in places if step is not None]
    return Answer(tokens, output.num_cached_tokens or 0, report, logprobs, of_prompt)
