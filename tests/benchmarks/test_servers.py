"""Servers of a benchmark: equal settings for all, and none left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import servers
from kvgraft_lab.testbed import MODEL_DIR
from servers import THREADS, ServerOptions

START = f"""
import sys
sys.path.insert(0, {str(Path(servers.__file__).parent)!r})
from pathlib import Path
from servers import ServerOptions, start
with start(ServerOptions(Path({str(MODEL_DIR)!r}))):
    pass
"""


def test_every_server_has_the_same_settings_and_its_own_flags():
    options = ServerOptions(
        Path("model"), max_num_batched_tokens=512, threads=2, kv_gib=3, flags=("--seed", "1")
    )
    arguments = options.arguments()
    assert arguments[0] == "model"
    assert arguments[-4:] == ["--max-num-batched-tokens", "512", "--seed", "1"]
    assert (
        options.environment().items()
        >= {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "0,1"}.items()
    )
    assert "--max-num-batched-tokens" not in ServerOptions(Path("model")).arguments()
    assert THREADS >= 1, "vLLM would choose another number with a connector than without"


def test_two_servers_share_a_gpu_and_vllm_makes_up_weights():
    arguments = ServerOptions(Path("model"), device="cuda", dummy_weights=True).arguments()
    assert "--load-format dummy" in " ".join(arguments)
    assert 2 * float(arguments[arguments.index("--gpu-memory-utilization") + 1]) < 0.95
    assert "--enforce-eager" in arguments
    assert (
        "--enforce-eager"
        not in ServerOptions(Path("model"), device="cuda", compiled=True).arguments()
    )
    assert ServerOptions(Path("model"), device="cuda").environment() == {}
    assert "--gpu-memory-utilization" not in ServerOptions(Path("model")).arguments()


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind():
    with subprocess.Popen([sys.executable, "-c", START]) as benchmark:
        started: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 60
            while not any(map(is_at_work, started)) and time.monotonic() < deadline:
                time.sleep(0.05)
                started = psutil.Process(benchmark.pid).children()
            benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(60) == 128 + signal.SIGTERM
            assert len(started) == 1
            assert not started[0].is_running()
        finally:
            benchmark.kill()
            for server in started:
                if server.is_running():
                    server.kill()


def is_at_work(process: psutil.Process) -> bool:
    """Whether it is more than a copy of its parent that has not become another program yet."""
    return "serve" in process.cmdline() and process.cpu_times().user > 0.2
