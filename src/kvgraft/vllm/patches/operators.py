"""vLLM's fused kernels for decoder layers that run one by one in a compiled server.

In a compiled server norms, rotary embeddings and activations are plain torch operators, for
Inductor to fuse (`custom_ops: none`). Outside of the compiled graph each of these operators is a
launch: 62 in a layer of Qwen3 on CUDA, and 12 with the fused kernels.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.ir.op import IrOp, enable_torch_wrap
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform


def takes_any_rows(config: VllmConfig) -> bool:
    """Return True if the compiled model takes any number of token ids and plain attention.

    It does not if rows must be a multiple of the ranks (sequence parallelism), if prompts may
    bring embeddings, or if the attention also quantises its output.
    """
    passes = config.compilation_config.pass_config
    # Only vLLM 0.31 has this setting.
    has_sequence_parallelism = getattr(passes, "enable_sp", False)
    return not (
        has_sequence_parallelism
        or config.model_config.enable_prompt_embeds
        or passes.fuse_attn_quant
    )


class FusedOperators:
    """Operators that vLLM would run as fused kernels if the model were not compiled.

    Operators that `custom_ops` disables, as in "-rms_norm", stay as they are.

    Args:
        config: vLLM's configuration.
        modules: modules in which operators are searched.
    """

    def __init__(self, config: VllmConfig, modules: Iterable[nn.Module]) -> None:
        self._kernels: list[tuple[CustomOp, Callable[..., Any]]] = []
        self._providers: dict[str, list[str]] = {}
        if config.compilation_config.mode == CompilationMode.NONE:
            return

        refused = {
            name[1:] for name in config.compilation_config.custom_ops if name.startswith("-")
        }
        found = (
            part for module in modules for part in module.modules() if isinstance(part, CustomOp)
        )
        with set_current_vllm_config(config):
            for operator in dict.fromkeys(found):
                kernel = None if operator.name in refused else _kernel_of(operator)
                if kernel is not None:
                    self._kernels.append((operator, kernel))

        eager = copy.copy(config)
        eager.compilation_config = copy.copy(config.compilation_config)
        eager.compilation_config.mode = CompilationMode.NONE
        self._providers = {
            name: providers
            for name, providers in asdict(
                current_platform.get_default_ir_op_priority(eager)
            ).items()
            if providers
        }

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run the operators as fused kernels within a context."""
        with ExitStack() as stack:
            for operator, kernel in self._kernels:
                stack.callback(
                    partial(setattr, operator, "_forward_method", operator._forward_method)
                )
                operator._forward_method = kernel
            for name, providers in self._providers.items():
                stack.enter_context(IrOp.registry[name].set_priority(providers))
            if self._providers:
                stack.enter_context(enable_torch_wrap(False))
            yield


def _kernel_of(operator: CustomOp) -> Callable[..., Any] | None:
    """Return the fused kernel of an operator that runs natively, or None."""
    running = operator._forward_method
    # Some native operators are compiled on their own.
    if getattr(running, "_torchdynamo_orig_callable", running) != operator.forward_native:
        return None
    enforced, operator._enforce_enable = operator._enforce_enable, True
    kernel: Callable[..., Any] = operator.dispatch_forward(compile_native=False)
    operator._enforce_enable = enforced
    is_default = getattr(kernel, "__func__", None) in vars(CustomOp).values()
    return None if is_default else kernel
