"""How processes of an engine end: with their parent, and not by Ctrl-C in a terminal."""

import multiprocessing
import os
import signal
import threading
import time

from kvgraft.vllm.options import CONTROL_TOKEN


def leave_signals_to_server() -> None:
    """Let only the API server act on Ctrl-C, and tell it of no signal that this engine or worker
    gets.

    Ctrl-C reaches every process of a terminal; a worker of vLLM would end at once. The API server
    ends its engine by SIGTERM when no request runs any more. A process that was forked shares the
    pipe by which the event loop of the API server learns of its signals, and would write to it that
    it got one."""
    is_child = multiprocessing.parent_process() is not None and CONTROL_TOKEN in os.environ
    if is_child and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


LOOK_S = 1.0  # between two looks at the parent
GRACE_S = 5.0  # in which a process may end in order, once its parent is gone
_NAME = "kvgraft-parent-watch"


def end_with_parent() -> None:
    """End this process soon after the one that started it, however that ends.

    Only processes that vLLM has started are watched: a server that a shell has started outlives the
    shell."""
    is_child = multiprocessing.parent_process() is not None
    if not is_child or any(thread.name == _NAME for thread in threading.enumerate()):
        return
    # With a fork server the parent is that server, not the process that asked for this one; both
    # end together.
    threading.Thread(target=_watch, args=(os.getppid(),), name=_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)

    # vLLM's own handler ends requests and workers, and lets stores write what they hold.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
