"""Signals in the processes of a server's engine, which belong to its API server."""

import multiprocessing
import os
import signal
import threading

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
