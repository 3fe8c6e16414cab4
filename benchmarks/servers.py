"""Servers that a benchmark starts for itself, all with the same settings."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvgraft.server.process import Server, serving

# large pages, and none given back to the system after each layer (for which vLLM preloads tcmalloc
# where it has it): otherwise two processes of one program differ by a seventh, by the luck of where
# their memory lies
MALLOC = ("hugetlb=1", "mmap_max=0", f"trim_threshold={8 << 30}")
MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in MALLOC),
}
GPU_SHARE = 0.44  # of its memory, that each of two servers takes
THREADS = max(1, (os.cpu_count() or 1) - 1)


@dataclass(frozen=True)
class ServerOptions:
    """Settings that a pair of servers has in common.

    Attributes:
        max_num_batched_tokens: of one step; 0 leaves it to vLLM.
        threads: CPU cores that the model runs on, from core 0. By default one is left to the rest;
            vLLM's own choice would be another one with a connector than without.
        kv_gib: memory of the KV pool, on a CPU.
        flags: any more flags of vLLM.
        device: "cpu" or "cuda".
        dummy_weights: whether vLLM makes up the weights of a model that has none (`--load-format
            dummy`).
        compiled: whether vLLM compiles the model and captures CUDA graphs, as it does by default on
            a GPU.
    """

    model: Path
    dtype: str = "float32"
    max_model_len: int = 4096
    max_num_batched_tokens: int = 0
    threads: int = THREADS
    kv_gib: int = 1
    flags: tuple[str, ...] = ()
    device: str = "cpu"
    dummy_weights: bool = False
    compiled: bool = False

    def arguments(self) -> list[str]:
        """The command line after `kvgraft serve`."""
        chosen = {
            "--enforce-eager": not self.compiled,
            "--load-format dummy": self.dummy_weights,
            f"--gpu-memory-utilization {GPU_SHARE}": self.device == "cuda",
            f"--max-num-batched-tokens {self.max_num_batched_tokens}": self.max_num_batched_tokens,
        }
        return [
            str(self.model), "--dtype", self.dtype, "--max-model-len", str(self.max_model_len),
            "--block-size", "32",
            "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
            *(word for flag, wanted in chosen.items() if wanted for word in flag.split()),
            *self.flags,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """What vLLM reads from its environment."""
        if self.device != "cpu":
            return {}
        cores = ",".join(map(str, range(self.threads)))
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            **MEMORY,
        }


def restart_with(wanted: Mapping[str, str]) -> None:
    """Begin this program anew with these variables, unless it has them: malloc and OpenMP read
    theirs at the start."""
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict(wanted))  # noqa: S606


@contextmanager
def start(
    options: ServerOptions, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server with these settings and more flags; see `kvgraft.server.process.serving`."""
    settings = options.environment() | dict(environment or {})
    with ExitStack() as stack:
        stack.enter_context(_leaving_at_sigterm())
        with Console(stderr=True).status("starting a server"):
            server = stack.enter_context(
                serving(*options.arguments(), *flags, environment=settings)
            )
        yield server


@contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """A signal that would end this process at once raises SystemExit, so that it does not leave the
    server behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
