"""Which KV heads of the model look far, for policies that work head by head."""

from pathlib import Path

import msgspec
from vllm.config import VllmConfig

from kvgraft.engine.profiles import load_head_map
from kvgraft.kv.heads import HeadMap
from kvgraft.vllm.compat.families import IN_STEPS, architecture_of, is_plain
from kvgraft.vllm.settings import KVGraftSettings


def works_by_head(config: VllmConfig) -> bool:
    """Whether policies that work head by head can be run by the layers of this model."""
    return architecture_of(config) in IN_STEPS and is_plain(config)


def find_head_map(config: VllmConfig) -> HeadMap | None:
    """The map of the server's settings, or one that lies beside the weights and fits them; None if
    there is none.

    Raises:
        FileNotFoundError, ValueError: the settings name none, or one of another model.
    """
    model = config.model_config
    shape = model.get_num_layers(config.parallel_config), model.get_total_num_kv_heads()
    return load_head_map(KVGraftSettings.of(config).head_map, Path(model.model), *shape)


def map_of_rank(head_map: HeadMap, config: VllmConfig, rank: int) -> HeadMap:
    """That of the KV heads which a tensor-parallel rank has; where ranks outnumber heads, several
    have the same one."""
    parallel, total = config.parallel_config, len(head_map.classes[0])
    first, count = (
        rank * total // parallel.tensor_parallel_size,
        config.model_config.get_num_kv_heads(parallel),
    )
    return msgspec.structs.replace(
        head_map, classes=tuple(row[first : first + count] for row in head_map.classes)
    )
