"""Entry point of `vllm.general_plugins`.

vLLM calls it in every process, perhaps more than once, even if KVGraft is not used.
"""

import logging

_THEIRS = logging.getLogger("vllm")


class _AsVllm(logging.Handler):
    """Pass records to the handlers of vLLM's logger, as they are configured at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in _THEIRS.handlers if _THEIRS.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                handler.handle(record)


def log_as_vllm() -> None:
    """Log where vLLM logs, at its level, from INFO on."""
    ours = logging.getLogger("kvgraft")
    if not any(isinstance(handler, _AsVllm) for handler in ours.handlers):
        ours.addHandler(_AsVllm())
        ours.setLevel(ours.level or logging.INFO)


def register() -> None:
    """Register connector and model classes by name, set up logging, and watch the parent process.

    Engines and workers end when their parent is gone. Nothing heavy is imported: the classes load
    when they are needed.
    """
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvgraft.vllm.process_lifetime import end_with_parent

    log_as_vllm()
    end_with_parent()

    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"):
        ModelRegistry.register_model(
            f"KVGraftByHead{family}ForCausalLM", f"kvgraft.vllm.heads.model:{family}ByHead"
        )

    try:
        KVConnectorFactory.register_connector(
            "KVGraftConnector", "kvgraft.vllm.connector", "KVGraftConnector"
        )
    # An earlier call in this process has registered it.
    except ValueError:
        return
