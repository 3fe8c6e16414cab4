"""Triton kernels where there is no device: a call compiles them for CUDA (sm_90), as it needs them, and does no more.

For a process without the interpreter, which lets pass what the compiler does not.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

compiled: list[tuple[str, int]] = []  # kernels, and bytes of shared memory


class Nowhere:
    """A driver of no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """From here on kernels are compiled when they are called."""
    driver.set_active(Nowhere())
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert len(kernel.asm["cubin"]) > 1000
        compiled.append((self.fn.__name__, kernel.metadata.shared))
        return kernel

    JITFunction.run = compile_instead
