"""Ends an engine or worker process of vLLM whose parent is gone: vLLM may leave one, with its
memory."""

import multiprocessing
import os
import signal
import threading
import time

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
