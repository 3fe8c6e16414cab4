"""Choice of the requests that a step decodes sparsely, added to the metadata of vLLM's backends."""

from dataclasses import dataclass, replace
from functools import cached_property
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

    With drafts, a request has several tokens in a step. Each of them chooses its own blocks.

    Attributes:
        queries: int64 [r], rows of these tokens among those of the step.
        pages: int64 [r, T], the block table of each token.
        full: int64 [r], number of full pages before each token.
        batch: one row for each KV head of each token.
        others: metadata of the same step in which these requests have no context but their tokens
            of the step, so that vLLM's work for them costs next to nothing. None if the call has no
            other requests.
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
    # each KV cache group has its own pages
    supports_update_block_table: ClassVar[bool] = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, *args, **kwargs)  # type: ignore[call-arg]
        self.program = program_of(self.vllm_config)  # type: ignore[attr-defined]
        self._layers = layer_names
        self._num_heads: int = kv_cache_spec.num_kv_heads
        speculation = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        self._num_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._others: Any = None

        if self.program is None:
            return

        if kv_cache_spec.block_size != self.program.block_size:
            raise UnsupportedConfiguration(
                f"flow {self.program.flow.name!r} cannot be followed with blocks of "
                f"{self.program.block_size} tokens "
                f"where the attention kernel takes {kv_cache_spec.block_size}: set --block-size to "
                "that"
            )

        # A builder overwrites the plan of one metadata with the next, so the other one needs its
        # own builder.
        twin = self.STOCK(kv_cache_spec, layer_names, *args, **kwargs)

        # FlashInfer's workspace is large and used by one call at a time, so both builders share it.
        if hasattr(twin, "set_workspace_buffer"):
            twin.set_workspace_buffer(self._get_workspace_buffer())  # type: ignore[attr-defined]

        # so is that of latent attention
        if hasattr(twin, "chunked_prefill_workspace"):
            twin.chunked_prefill_workspace = self.chunked_prefill_workspace  # type: ignore[attr-defined]

        self._others = twin

        # layers are made before vLLM chooses the block size for their backend
        layers: Any = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        for name in layer_names:
            if layers[name].impl.follows:
                layers[name].impl.follow(self.program)

    @cached_property
    def _is_followed(self) -> bool:
        """True if a layer of this builder follows the flow: not those of windows and drafts."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context
        return any(layers[name].impl.follows for name in self._layers)

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        """Return NEVER, for the reason given in the class."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build metadata as vLLM does, and add the sparse requests."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        rows = common_attn_metadata.num_actual_tokens
        if self.vllm_config.model_config.use_mla:  # type: ignore[attr-defined]
            # latent attention has a call of its own for the leading rows, those that decode
            rows = metadata.num_decode_tokens
        metadata.kvgraft_sparse = self._sparse(common_attn_metadata, rows)
        return metadata

    def _sparse(self, common: Any, num_rows: int) -> SparseMetadata | None:
        """Return the requests that the step decodes sparsely, or None.

        These are no prefills, and have one token and drafts only. A token at which the sequence is
        shorter than `Program.first_tokens` is left to vLLM.

        Args:
            num_rows: number of the step's first tokens that one call attends for.
        """
        program = self.program
        if program is None or common.is_prefilling is None or common.causal is not True:
            return None
        if not self._is_followed:
            return None

        starts = common.query_start_loc_cpu.long()
        counts = starts.diff()
        # with drafts, vLLM's bound on the CPU counts drafts that were rejected
        lengths = common.seq_lens.cpu().long() if self._num_drafts else lengths_of(common)
        lengths = lengths[: len(counts)]
        decodes = (
            (counts >= 1)
            & (counts <= 1 + self._num_drafts)
            & ~common.is_prefilling[: len(lengths)].cpu()
        )
        requests = torch.arange(len(counts)).repeat_interleave(counts)
        rows = torch.arange(len(requests))
        # tokens up to each token of the step, itself included
        own = rows + (lengths - starts[1:])[requests] + 1
        is_sparse = decodes[requests] & (own >= program.first_tokens) & (rows < num_rows)
        if not is_sparse.any():
            return None

        others = None
        if not is_sparse[:num_rows].all():
            # if the first token is sparse, so are the others
            whole = decodes & is_sparse[starts[:-1].clamp(max=len(rows) - 1)]
            others = self._others.build(0, _without_context(common, whole, counts))
        queries = is_sparse.nonzero()[:, 0]
        requests, own = requests[queries], own[queries]

        table, num_blocks = common.block_table_tensor, -(-int(own.max()) // program.block_size)
        pages = table[requests.to(table.device), :num_blocks].long()
        heads = torch.arange(self._num_heads, device=table.device)
        by_head = (pages[:, None] * self._num_heads + heads[:, None]).flatten(0, 1)
        batch = Batch(by_head, own.repeat_interleave(self._num_heads), program.block_size)
        full = (own // program.block_size).to(table.device)

        return SparseMetadata(queries.to(table.device), pages, full, batch, others)


def _without_context(common: Any, sparse: Tensor, counts: Tensor) -> Any:
    """Return metadata of the same step, in which some requests have no tokens before it.

    Args:
        sparse: bool [requests], those whose tokens are all decoded sparsely.
        counts: int64 [requests], tokens of each request in the step.
    """
    changed: dict[str, Any] = {}
    for name in ("seq_lens", "seq_lens_cpu_upper_bound"):
        lengths = getattr(common, name, None)
        if lengths is not None:
            here, own = (
                torch.nn.functional.pad(x, (0, len(lengths) - len(x))).to(lengths.device)
                for x in (sparse, counts.to(lengths.dtype))
            )
            changed[name] = torch.where(here, own, lengths)
    return replace(common, **changed)
