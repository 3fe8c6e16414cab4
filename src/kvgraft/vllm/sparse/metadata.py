"""Choice of the requests that a step decodes sparsely, added to the metadata of vLLM's backends."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport

from kvgraft.decode.batch import Batch
from kvgraft.vllm.compat.support import UnsupportedConfiguration
from kvgraft.vllm.lengths import lengths_of
from kvgraft.vllm.sparse.program import program_of


@dataclass(frozen=True, eq=False)
class SparseMetadata:
    """Requests that a step decodes sparsely.

    Attributes:
        queries: int64 [r], rows of their tokens among those of the step.
        pages: int64 [r, T], their block tables.
        full: int64 [r], number of full pages in each table.
        batch: one row for each KV head of these requests.
        others: metadata of the same step in which these requests have one token of context, so that
            vLLM's work for them costs nothing. None if the step has no other requests.
    """

    queries: Tensor
    pages: Tensor
    full: Tensor
    batch: Batch
    others: Any


class SparseBuilder:
    """Mixin before a metadata builder of vLLM, which adds the requests to decode sparsely.

    Steps are not captured as a whole, because the number and choice of sparse requests change from
    step to step. Pieces between attention layers are still captured.

    Raises:
        UnsupportedConfiguration: the kernel's block size differs from that of the traced flow.
    """

    STOCK: ClassVar[type]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.program = program_of(self.vllm_config)  # type: ignore[attr-defined]
        spec = self.kv_cache_spec  # type: ignore[attr-defined]
        self._num_heads: int = spec.num_kv_heads
        self._others: Any = None

        if self.program is None:
            return

        if spec.block_size != self.program.block_size:
            raise UnsupportedConfiguration(
                f"flow {self.program.flow.name!r} cannot be followed with blocks of "
                f"{self.program.block_size} tokens "
                f"where the attention kernel takes {spec.block_size}: set --block-size to that"
            )

        # A builder overwrites the plan of one metadata with the next, so the other one needs its
        # own builder.
        twin = self.STOCK(*args, **kwargs)

        # FlashInfer's workspace is large and used by one call at a time, so both builders share it.
        if hasattr(twin, "set_workspace_buffer"):
            twin.set_workspace_buffer(self._get_workspace_buffer())  # type: ignore[attr-defined]

        self._others = twin

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        """Return NEVER, for the reason given in the class."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build metadata as vLLM does, and add the sparse requests."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        metadata.kvgraft_sparse = self._sparse(common_attn_metadata)
        return metadata

    def _sparse(self, common: Any) -> SparseMetadata | None:
        """Return the requests that the step decodes sparsely, or None.

        These have one query, are no prefills, and have more blocks than the flow reads at most.
        """
        program = self.program
        if program is None or common.is_prefilling is None or common.causal is not True:
            return None

        starts = common.query_start_loc_cpu.long()
        lengths = lengths_of(common)[: len(starts) - 1]
        blocks = -(-lengths // program.block_size)
        sparse = (
            (starts.diff() == 1)
            & (blocks > program.most)
            & ~common.is_prefilling[: len(lengths)].cpu()
        )
        rows = sparse.nonzero()[:, 0]

        if not rows.numel():
            return None

        others = None if bool(sparse.all()) else self._others.build(0, _shortened(common, sparse))
        table, own = common.block_table_tensor, lengths[rows]
        pages = table[rows.to(table.device), : int(blocks[rows].max())].long()
        heads = torch.arange(self._num_heads, device=table.device)
        by_head = (pages[:, None] * self._num_heads + heads[:, None]).flatten(0, 1)
        batch = Batch(by_head, own.repeat_interleave(self._num_heads), program.block_size)
        full = (own // program.block_size).to(table.device)

        return SparseMetadata(starts[rows].to(table.device), pages, full, batch, others)


def _shortened(common: Any, sparse: Tensor) -> Any:
    """Return metadata of the same step, in which the sparse requests have one token of context."""
    changed: dict[str, Any] = {}
    for name in ("seq_lens", "seq_lens_cpu_upper_bound"):
        lengths = getattr(common, name, None)
        if lengths is not None:
            here = torch.nn.functional.pad(sparse, (0, len(lengths) - len(sparse))).to(
                lengths.device
            )
            changed[name] = torch.where(here, 1, lengths)
    return replace(common, **changed)
