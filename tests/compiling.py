"""Triton kernels where there is no device: a call compiles them for CUDA (sm_90), as it needs them,
and does no more.

For a process without the interpreter, which lets pass what the compiler does not.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

kernels: dict[int, JITFunction] = {}  # by identity, those that were called
# kernels, bytes of shared memory, bytes that a thread spills
compiled: list[tuple[str, int, int]] = []
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


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
        kernels[id(self)] = self
        compiled.append(
            (self.fn.__name__, kernel.metadata.shared, spilled_bytes(kernel.asm["cubin"]))
        )
        return kernel

    JITFunction.run = compile_instead


def variants() -> list[str]:
    """The kernels that were compiled, each as often as it was for other arguments."""
    return [
        kernel.fn.__name__
        for kernel in kernels.values()
        for caches in kernel.device_caches.values()
        for _ in caches[0]
    ]


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of a thread's stack, where registers that it has too few of go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", printed.stdout + printed.stderr)
    assert found is not None, printed
    return int(found[1])
