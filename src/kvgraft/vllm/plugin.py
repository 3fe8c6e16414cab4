"""Entry point in `vllm.general_plugins`: vLLM calls it in every process, used or not, perhaps more than once."""


def register() -> None:
    """Make the connector known by name. Imports nothing heavy: the connector's module loads when it is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVGraftConnector", "kvgraft.vllm.connector", "KVGraftConnector")
    except ValueError:  # registered by an earlier call in this process
        return
