"""Head maps: classes of the model's KV heads, for policies that work head by head."""

from pathlib import Path

import msgspec
from vllm.config import VllmConfig

from kvgraft.engine.profiles import load_head_map
from kvgraft.kv.heads import HeadMap
from kvgraft.vllm.compat.families import IN_STEPS, architecture_of, is_by_head, is_plain
from kvgraft.vllm.settings import KVGraftSettings


def works_by_head(config: VllmConfig) -> bool:
    """Return True if the layers of this model can run policies that work head by head."""
    # No head map can be made of a multimodal checkpoint: the native engine does not run it.
    is_text = not config.model_config.is_multimodal_model
    return is_text and architecture_of(config) in IN_STEPS and is_plain(config)


def find_head_map(config: VllmConfig) -> HeadMap | None:
    """Return the head map of the settings, or one that lies with the weights and fits them.

    With per-head KV eviction its heads are of the classes that vLLM keeps on this number of ranks.

    Returns:
        None if there is none.

    Raises:
        FileNotFoundError, ValueError: the settings name no map, or one of another model.
    """
    model = config.model_config
    shape = model.get_num_layers(config.parallel_config), model.get_total_num_kv_heads()
    found = load_head_map(KVGraftSettings.of(config).head_map, Path(model.model), *shape)
    if found is None or not is_by_head(config):
        return found
    return found.levelled(config.parallel_config.tensor_parallel_size)


def map_of_rank(head_map: HeadMap, config: VllmConfig, rank: int) -> HeadMap:
    """Return the map of the KV heads on a tensor-parallel rank.

    If there are more ranks than heads, several ranks have the same head.
    """
    parallel, total = config.parallel_config, len(head_map.classes[0])
    first, count = (
        rank * total // parallel.tensor_parallel_size,
        config.model_config.get_num_kv_heads(parallel),
    )
    return msgspec.structs.replace(
        head_map, classes=tuple(row[first : first + count] for row in head_map.classes)
    )
