"""Entry point in `vllm.general_plugins`: vLLM calls it in every process, used or not, perhaps more than once."""


def register() -> None:
    """Make connector and model classes known by name, and let vLLM print what we log. Imports nothing heavy: they load
    when they are asked for."""
    import logging

    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    ours, theirs = logging.getLogger("kvgraft"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = [*theirs.handlers]
        ours.setLevel(theirs.getEffectiveLevel())
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        ModelRegistry.register_model(f"KVGraftByHead{family}ForCausalLM", f"kvgraft.vllm.heads.model:{family}ByHead")
    try:
        KVConnectorFactory.register_connector("KVGraftConnector", "kvgraft.vllm.connector", "KVGraftConnector")
    except ValueError:  # registered by an earlier call in this process
        return
