"""Entry point in `vllm.general_plugins`: vLLM calls it in every process, used or not, perhaps more
than once."""

import logging

_THEIRS = logging.getLogger("vllm")


class _AsVllm(logging.Handler):
    """Has the handlers of vLLM's logger print a record, however and whenever that is configured."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in _THEIRS.handlers if _THEIRS.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                handler.handle(record)


def log_as_vllm() -> None:
    """Print what we log where vLLM prints, at its level, from INFO on."""
    ours = logging.getLogger("kvgraft")
    if not any(isinstance(handler, _AsVllm) for handler in ours.handlers):
        ours.addHandler(_AsVllm())
        ours.setLevel(ours.level or logging.INFO)


def register() -> None:
    """Make connector and model classes known by name, let vLLM print what we log, and end engines
    and workers whose parent is gone. Imports nothing heavy: they load when they are asked for."""
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvgraft.vllm.process_lifetime import end_with_parent

    log_as_vllm()
    end_with_parent()
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        ModelRegistry.register_model(
            f"KVGraftByHead{family}ForCausalLM", f"kvgraft.vllm.heads.model:{family}ByHead"
        )
    try:
        KVConnectorFactory.register_connector(
            "KVGraftConnector", "kvgraft.vllm.connector", "KVGraftConnector"
        )
    except ValueError:  # registered by an earlier call in this process
        return
