"""End of an engine's processes: with their parent, and not by Ctrl-C in a terminal."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress

import psutil

from kvgraft.vllm.options import CONTROL_TOKEN


def leave_signals_to_server() -> None:
    """Let only the API server act on Ctrl-C.

    Ctrl-C reaches every process of a terminal, and a worker of vLLM would end at once. The API
    server ends its engine by SIGTERM when no request runs any more. A forked process also shares
    the pipe that signals the API server's event loop, and must not write to it.
    """
    is_child = multiprocessing.parent_process() is not None and CONTROL_TOKEN in os.environ
    if is_child and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# seconds between checks of the parent
LOOK_S = 1.0
# seconds to end in order after the parent is gone
GRACE_S = 5.0
_NAME = "kvgraft-parent-watch"


def end_with_parent() -> None:
    """End this process soon after its parent has ended in any way.

    Only processes that vLLM has started are watched. A server that a shell has started outlives the
    shell.
    """
    # With a fork server this is the process that asked for this one. The fork server itself lives
    # as long as its children.
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.pid,), name=_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    """Wait until the process `parent` is gone, then end this process, in order if possible."""
    with suppress(psutil.NoSuchProcess):
        watched = psutil.Process(parent)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            time.sleep(LOOK_S)

    # vLLM's own handler ends requests and workers, and lets stores write what they hold.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
