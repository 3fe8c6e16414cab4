"""The loaded model and its cache, on every platform of vLLM."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvgraft.kernels.layout import AttentionLayout, joined
from kvgraft.kv.rope import Rope
from kvgraft.vllm.compat import head_attention, latent
from kvgraft.vllm.compat.adapters import RunnerAdapters
from kvgraft.vllm.compat.decoder_caches import DecoderCaches
from kvgraft.vllm.compat.decoder_layers import (
    embed,
    language_model_of,
    layers_of,
    output_states,
    window_of,
)
from kvgraft.vllm.compat.drafts import Drafter, has_draft_model
from kvgraft.vllm.compat.families import is_by_head
from kvgraft.vllm.compat.group_attention import RecoveryAttention, RowsMetadata, pseudo_sequences
from kvgraft.vllm.compat.key_rotation import KeyRotation, rotation_of
from kvgraft.vllm.compat.pools import PoolLayout
from kvgraft.vllm.compat.residuals import ResidualStreams
from kvgraft.vllm.compat.support import UnsupportedConfiguration, check_language_model
from kvgraft.vllm.groups import order_of
from kvgraft.vllm.patches.operators import FusedOperators, takes_any_rows
from kvgraft.vllm.patches.replacing import before_attending

# vLLM's slot for padding
NO_SLOT = -1
# dtype of vLLM's model runners, for which a compiled model was compiled
TOKEN_ID_DTYPE = torch.int32
# relative tolerance of rotated keys
TURNING_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class _Stop(Exception):
    """Exception that ends a decoder layer as soon as its queries, keys and values are known."""


class ModelHost(DecoderCaches):
    """The loaded model and its cache on one tensor-parallel rank, as recoveries use them.

    Args:
        runner: vLLM's model runner, V1 or V2, after its KV cache was set up.
        residual_layers: layers whose incoming residual stream is kept.

    Attributes:
        attentions: attention layers of the decoder layers, one each, or one for each KV head;
            behind them those of the draft model, if there is one.
        rotations: key rotation by attention layer.
        windows: by decoder layer, number of tokens back that it sees; None for all.
        attention: choice of the attention kernels for a recovery's rows.
        head_paging: True if each KV head is an attention layer.
        fused_operators: context in which layers run vLLM's fused kernels in a compiled server.
        runs_as_one: True if `run_model` can replace calls of all layers.

    Raises:
        UnsupportedConfiguration: the cache layout cannot be read, keys do not rotate as the config
            says, or a multimodal model holds an unexpected language model.
    """

    def __init__(self, runner: Any, residual_layers: Iterable[int] = ()) -> None:
        self.config: VllmConfig = runner.vllm_config
        self.adapters = RunnerAdapters(runner)
        self._model = runner.get_model()
        check_language_model(self.config, self._language_model)
        self.layers = layers_of(self._language_model)
        self.num_layers = len(self.layers)
        order = order_of([group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups])
        groups = [
            (order.index(number), group)
            for number, of in enumerate(runner.attn_groups)
            for group in of
        ]
        self._builders = [group.get_metadata_builder() for _, group in groups]
        sizes = (
            int(self.config.cache_config.block_size),
            int(self._builders[0].kv_cache_spec.block_size),
        )
        self._group_of_builder = [number for number, _ in groups]
        names = [attention.layer_name for layer in self.layers for attention in layer.attentions]
        places = {name: at for at, (_, group) in enumerate(groups) for name in group.layer_names}
        self._builder_of = [places[name] for name in names]
        super().__init__(
            [layer.attentions for layer in self.layers],
            [self._group_of_builder[place] for place in self._builder_of],
            self.config.model_config.dtype,
            runner.device,
            *sizes,
        )
        self.head_paging = is_by_head(self.config)
        self.scale = float(self.attentions[0].impl.scale)
        self.rotations = [
            rotation_of(self.config, layer.rotary, index, self.head_dim)
            for index, layer in enumerate(self.layers)
            for _ in layer.attentions
        ]
        self.windows = [window_of(layer.attention) for layer in self.layers]
        self.fused_operators = FusedOperators(self.config, (layer.module for layer in self.layers))

        # vLLM has profiled its memory for this many rows.
        self.max_rows = int(self.config.scheduler_config.max_num_batched_tokens)
        self._check_turning()
        self.drafter = Drafter(runner) if has_draft_model(self.config) else None

        # The draft model is in the main group, which is the only one there.
        if self.drafter is not None:
            self.attentions = [*self.attentions, *self.drafter.attentions]
            self.group_of += [0] * len(self.drafter.attentions)
            self.rotations += [KeyRotation(self.drafter.rope)] * len(self.drafter.attentions)

        self.attention = RecoveryAttention.of(
            groups, self.config, self.device, drafts=self.drafter is not None
        )
        self.num_blocks = int(self.config.cache_config.num_gpu_blocks or 0)
        self.hidden_size = int(self.config.model_config.get_hidden_size())
        shape = (self.num_blocks * self.block_size, self.hidden_size, self.dtype, self.device)
        first_names = [names[own[0]] for own in self._attentions_of]
        self.residuals = ResidualStreams(self.layers, first_names, residual_layers, *shape)
        self.runs_as_one = self._can_run_as_one()

    @property
    def _language_model(self) -> Any:
        """Language model inside a multimodal model; for other models, the model itself."""
        return language_model_of(self._model)

    @property
    def plain_rope(self) -> Rope:
        """Rotary frequencies with which all layers rotate all channels of their keys.

        Raises:
            ValueError: layers differ, or some channels do not rotate.
        """
        [rotation, *others] = set(self.rotations[: self._attentions_of[-1].stop])
        if others or rotation.rope is None or not rotation.is_plain:
            raise ValueError("the layers of this model turn their keys in different ways")
        return rotation.rope

    @property
    def draft_attentions(self) -> range:
        """Numbers of the draft model's attention layers."""
        return range(self._attentions_of[-1].stop, len(self.attentions))

    def normed(self, states: Tensor) -> Tensor:
        """Return the output of the model [n, D] for states [n, 2, D] that left the last layer."""
        hidden, residual = states[:, 0].contiguous(), states[:, 1].contiguous()
        return output_states(
            self._language_model, hidden, residual, keeps_residual=self.layers[-1].keeps_residual
        )

    def logits(self, states: Tensor) -> Tensor:
        """Return logits float32 [n, V] of final states [n, D], gathered on every rank."""
        return self._by_parts(self._model.compute_logits, states).float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings [n, D] of token ids int64 [n]."""
        return self._by_parts(partial(embed, self._language_model), token_ids)

    def _by_parts(self, compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply `compute` to parts of `max_rows` rows: adapters can be mapped for no more."""
        computed = []
        for part in rows.split(self.max_rows):
            self.adapters.map_rows(len(part))
            computed.append(compute(part))
        return joined(computed)

    def metadata(
        self,
        queries: Sequence[tuple[int, int, int]],
        tables: Sequence[Sequence[np.ndarray]],
        slots: Tensor,
        num_long: int,
        scattered: Sequence[AttentionLayout | None],
    ) -> list[RowsMetadata]:
        """Return the metadata that `run_layer` takes, by metadata builder.

        Runs are pseudo-sequences in the metadata of the backend, which is dense.

        Args:
            queries: per run (prompt, first position, stop position).
            tables: by group, per prompt its physical blocks, int [b].
            slots: int64 [groups, n], the slot of every query.
            num_long: number of runs before those in `scattered`.
            scattered: by builder the queries that our kernel computes, or None.
        """
        found = []
        for builder, group, layout in zip(
            self._builders, self.attention.groups, scattered, strict=True
        ):
            runs, backend = queries if layout is None else queries[:num_long], None
            if runs:
                common = self.common_metadata(runs, tables[group.number], slots[group.number])
                backend = builder.build(0, common, fast_build=True)
            found.append(RowsMetadata(backend, group.pool, layout))
        return found

    def common_metadata(
        self, queries: Sequence[tuple[int, int, int]], tables: Sequence[np.ndarray], slots: Tensor
    ) -> CommonAttentionMetadata:
        """Return the input of one group's metadata builders, from the arguments of `metadata`."""
        return pseudo_sequences(queries, tables, slots, self._kernel_blocks)

    def run_layer(
        self,
        index: int,
        metadata: Sequence[RowsMetadata],
        slots: Tensor,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        before_attention: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one stock decoder layer, which writes its KV to slots int64 [groups, n].

        Args:
            before_attention: called when the KV is written; it may change any KV.

        Returns:
            Hidden state and residual [n, D], and queries [n, Hq, d].
        """
        seen: list[Tensor] = []
        apart = before_attention is not None and self._stores_apart(index)

        def watch(query: Tensor, key: Tensor, value: Tensor) -> None:
            seen.append(query)
            if before_attention is not None and not apart:
                # The attention stores the same KV again after this.
                self.store_layer(index, key, value, slots)
                before_attention()

        with ExitStack() as stack:
            stack.enter_context(self._context([index], slots, metadata))
            stack.enter_context(self._watch(index, watch))
            if before_attention is not None and apart:
                stack.enter_context(before_attending(self._attention_of(index), before_attention))
            hidden, residual = self.layers[index](positions, hidden, residual)

        return hidden, residual, seen[0]

    def run_model(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        metadata: Sequence[RowsMetadata],
        before_attention: Mapping[int, Callable[[], None]],
    ) -> Tensor:
        """Run all layers in one forward pass of the stock model, compiled if the server is.

        Only if `runs_as_one`.

        Args:
            token_ids: [n], of `TOKEN_ID_DTYPE`.
            slots: int64 [groups, n], to which KV is written.
            before_attention: by layer, called when the KV of that layer is written.

        Returns:
            The output of the final norm, [n, D].
        """
        with ExitStack() as stack:
            stack.enter_context(
                self._context(range(self.num_layers), slots, metadata, compiled=True)
            )
            for index, act in before_attention.items():
                stack.enter_context(before_attending(self._attention_of(index), act))
            states: Tensor = self._model(
                **self._inputs(token_ids), positions=self._model_positions(positions),
                intermediate_tensors=None,
            )  # fmt: skip

        return states

    def _inputs(self, token_ids: Tensor) -> dict[str, Tensor | None]:
        """Return what the compiled model takes: a multimodal one takes embeddings."""
        if self.config.model_config.supports_multimodal_inputs:
            return {"input_ids": None, "inputs_embeds": self.embed(token_ids)}
        return {"input_ids": token_ids, "inputs_embeds": None}

    def _model_positions(self, positions: Tensor) -> Tensor:
        """Return the positions int64 [n] of text as the compiled model takes them.

        With M-RoPE every token has three, [3, n], with the strides of vLLM's buffer.
        """
        if not self.config.model_config.uses_mrope:
            return positions
        count = len(positions)
        places = positions.new_empty(3, count + 1)[:, :count]
        return places.copy_(positions)

    def project(
        self, index: int, slots: Tensor, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Run the first step of a layer: write its KV to slots, return queries [n, Hq, d]."""
        query, key, value = self.heads_of(index, slots, positions, hidden, residual)
        self.store_layer(index, key, value, slots)
        return query

    def heads_of(
        self, index: int, slots: Tensor, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [n, Hq, d], keys and values [n, Hkv, d] of a layer; write nothing."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def stop(query: Tensor, key: Tensor, value: Tensor) -> None:
            seen.append((query, key, value))
            raise _Stop

        with self._context([index], slots), self._watch(index, stop), suppress(_Stop):
            self.layers[index](positions, hidden, residual)
        return seen[0]

    def add_attention(
        self, index: int, attended: Tensor, hidden: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add attention [n, Hq, d] to the layer's input [n, D].

        Returns:
            Hidden state and residual behind the attention, [n, D] each.
        """
        self.adapters.map_rows(len(attended))
        return self.layers[index].project_output(attended.flatten(1)), hidden + residual

    @property
    def attends_by_head(self) -> bool:
        """True if `attend_heads` works."""
        return not self.head_paging and head_attention.attends_by_head(self.attentions[0])

    def head_metadata(self, index: int, common: Any, num_heads: int) -> Any:
        """Return metadata of `attend_heads` for `num_heads` KV heads at a layer.

        Args:
            common: `common_metadata` of the layer's group.
        """
        return head_attention.metadata_of(
            self._builders[self._builder_of[index]], common, num_heads
        )

    def attend_heads(self, index: int, heads: slice, query: Tensor, metadata: Any) -> Tensor:
        """Return stock attention [n, Hq, d] of some KV heads' queries [n, Hq, d]."""
        return head_attention.attend(self.attentions[index], heads, query, metadata)

    def feed_forward(
        self, index: int, positions: Tensor, hidden: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the last part of a layer, from the result of `add_attention`."""
        layer = self.layers[index]
        with self._context([index], self._no_slots(positions)), layer.after_attention(hidden):
            return layer(positions, hidden, residual)

    def run_around(
        self,
        index: int,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    ) -> tuple[Tensor, Tensor] | None:
        """Run one stock decoder layer with another attention.

        The cache and the residual streams stay as they are, since these tokens have no slots.

        Args:
            attend: takes queries [n, Hq, d], keys and values [n, Hkv, d], and returns [n, Hq, d].
                None ends the layer there.

        Returns:
            Hidden state and residual [n, D], or None if `attend` has ended the layer.
        """

        def forward(*given: Any, **_: Any) -> Tensor:
            attended = attend(*self._parts(index, given))
            if attended is None:
                raise _Stop
            return attended.flatten(1)

        layer = self.layers[index]
        with (
            self._context([index], self._no_slots(positions)),
            layer.attending(forward),
            suppress(_Stop),
        ):
            return layer(positions, hidden, residual)

        return None

    def pool_layout(self, index: int) -> tuple[PoolLayout, Rope] | None:
        """Return layout and rotary frequencies of a layer's cache, for kernels that write in it.

        Returns:
            None unless the cache is rows of the model's numbers and all channels rotate in halves.
        """
        at, *others = self.attentions_of(index)
        rope = self.rotations[at].rope
        if (
            others
            or self.rounds
            or self.is_latent
            or self.is_packed(at)
            or not self.rotations[at].is_plain
        ):
            return None

        layout = PoolLayout.of(self.attentions[at].kv_cache)
        return (
            None
            if layout is None or rope is None or rope.head_dim != self.head_dim
            else (layout, rope)
        )

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return a function that rotates a layer's keys [n, Hkv, d] by shifts int64 [n]."""
        angles = {rotation: rotation.angles(shifts) for rotation in set(self.rotations)}
        rotations = [self.rotations[own[0]] for own in self._attentions_of]
        return lambda index, keys: rotations[index].turn(keys, angles[rotations[index]])

    def clear_drafts(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] of the draft model, since they hold others' leftovers."""
        self._clear([self.attentions[at] for at in self.draft_attentions], blocks)

    def _check_turning(self) -> None:
        """Check the rotation: compute keys at two places, rotate the first and compare."""
        generator, count = torch.Generator().manual_seed(0), 8
        last = self.config.model_config.max_model_len - count
        tokens = torch.randint(
            self.config.model_config.get_vocab_size(), (count,), generator=generator
        )
        hidden, first = self.embed(tokens.to(self.device)), torch.arange(count, device=self.device)
        turn = self.rotate_keys(torch.full_like(first, last))

        for index in range(self.num_layers):
            keys = [self._keys_of(index, at, hidden) for at in (first, first + last)]
            if (turn(index, keys[0]) - keys[1]).norm() > TURNING_TOLERANCE[self.dtype] * keys[
                1
            ].norm():
                raise UnsupportedConfiguration(
                    f"KVGraft cannot turn the keys of layer {index}: RoPE is not as it seems"
                )

    def _keys_of(self, index: int, positions: Tensor, hidden: Tensor) -> Tensor:
        """Return keys [n, Hkv, d] of hidden states [n, D] that enter a layer at these positions."""
        seen: list[Tensor] = []
        residual = torch.zeros_like(hidden) if index else None
        self.run_around(
            index, positions, hidden.clone(), residual, lambda query, key, value: seen.append(key)
        )
        return seen[0].float()

    def _parts(self, index: int, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return an attention layer's arguments as [n, Hq, d] and twice [n, Hkv, d]."""
        if self.is_latent:
            return latent.parts(self.layers[index].attention, *given[:3])
        query, key, value = (rows.view(rows.shape[0], -1, self.head_dim) for rows in given[:3])
        return query, key, value

    def _no_slots(self, positions: Tensor) -> Tensor:
        """Return slots of tokens that are not kept, [groups, n]."""
        return torch.full_like(positions, NO_SLOT).expand(1 + max(self.group_of), -1)

    @contextmanager
    def _context(
        self,
        layers: Sequence[int],
        slots: Tensor,
        metadata: Sequence[RowsMetadata] = (),
        *,
        compiled: bool = False,
    ) -> Iterator[None]:
        """Prepare these layers to compute rows with slots int64 [groups, n]."""
        count = slots.shape[1]
        self.adapters.map_rows(count)
        named = [(self.attentions[at], at) for index in layers for at in self.attentions_of(index)]
        places = {attention.layer_name: slots[self.group_of[at]] for attention, at in named}
        given = {
            attention.layer_name: metadata[self._builder_of[at]].backend
            for attention, at in named
            if metadata
        }

        with ExitStack() as stack:
            for attention, at in named if metadata else ():
                stack.enter_context(metadata[self._builder_of[at]].attending(attention))
            stack.enter_context(
                set_forward_context(
                    given or None,
                    self.config,
                    num_tokens=count,
                    slot_mapping=places,
                    skip_compiled=not compiled,
                )
            )
            yield

    def _can_run_as_one(self) -> bool:
        """Return False where the output of single layers is needed."""
        is_seen = self.drafter is not None or self.residuals.residual_layers
        every = range(self.num_layers)
        return not is_seen and takes_any_rows(self.config) and all(map(self._stores_apart, every))

    def _attention_of(self, index: int) -> Any:
        """Return the one attention layer of a decoder layer."""
        [at] = self.attentions_of(index)
        return self.attentions[at]

    def _stores_apart(self, index: int) -> bool:
        """Return True if a layer stores KV in its one cache before its backend is called."""
        first, *others = (self.attentions[at] for at in self.attentions_of(index))
        by_backend = first.attn_backend.forward_includes_kv_cache_update
        return not (others or self.head_paging or self.is_latent or by_backend)

    @contextmanager
    def _watch(self, index: int, seen: Callable[..., None]) -> Iterator[None]:
        """Call `seen` with a layer's queries, keys and values before it attends."""
        attend = self.layers[index].attention.forward

        def forward(*given: Any, **named: Any) -> Tensor:
            seen(*self._parts(index, given))
            attended: Tensor = attend(*given, **named)
            return attended

        with self.layers[index].attending(forward):
            yield
