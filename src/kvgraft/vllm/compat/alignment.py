"""Copies of cached tokens to other positions ("align") in vLLM's cache, many layers at a time
(SparseX, 3.1).
"""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgraft.kernels.dispatch import align_paged
from kvgraft.kv.rope import by_head
from kvgraft.vllm.compat.key_rotation import Angles, KeyRotation
from kvgraft.vllm.compat.layer_caches import Places

if TYPE_CHECKING:
    from kvgraft.vllm.compat.model import ModelHost

# tokens to unpack at a time; they fit a CPU's cache
PACKED_TOKENS = 1024
# tokens per call; the kernel needs no memory of its own
TOKENS = 1 << 16


class Alignment:
    """Copy of some tokens in every layer, with keys rotated to their new positions.

    Where blocks are rows of numbers, one kernel call serves all layers of the same form. vLLM's CPU
    backend packs blocks for its instruction set. There each layer is unpacked, rotated and written
    by the backend.

    Args:
        host: the loaded model and its cache.
        source, target: slots int64 [n].
        shifts: int64 [n], number of positions that each token moves.
    """

    def __init__(self, host: "ModelHost", source: Tensor, target: Tensor, shifts: Tensor) -> None:
        self._host, self._source, self._target, self._shifts = host, source, target, shifts
        self._tables: dict[tuple[KeyRotation, int], Angles] = {}

    @staticmethod
    def most_tokens(host: "ModelHost") -> int:
        """Return the maximum number of tokens per alignment."""
        return PACKED_TOKENS if host.device.type == "cpu" else TOKENS

    def parts(self, layers: Sequence[int]) -> list[list[int]]:
        """Split these layers into groups that one call can serve."""
        by_form: dict[Hashable, list[int]] = {}
        for index in layers:
            rows = self._host.rows_of(index)
            alone = self._host.is_packed(index)
            form: Hashable = (
                index if alone else (self._host.rotations[index], rows.shape, rows.stride())
            )
            by_form.setdefault(form, []).append(index)
        return list(by_form.values())

    def __call__(self, part: Sequence[int]) -> None:
        """Copy keys and values in the layers of one of the `parts`, and rotate the keys."""
        index, rotation = part[0], self._host.rotations[part[0]]
        if self._host.is_packed(index):
            keys, values = self._host.codes_at(index, self._packed_places)
            turned = rotation.turn(keys.float(), self._angles(rotation, keys.shape[1]))
            self._host.write_codes(index, self._host.coded(turned), values, self._target)
            return

        angles = self._angles(rotation)
        if angles is None:
            angles = (torch.zeros(self._source.numel(), 0, device=self._source.device),) * 2

        caches = [self._host.rows_of(index) for index in part]
        align_paged(
            caches,
            self._source,
            self._target,
            *angles,
            first=rotation.first,
            interleaved=rotation.interleaved,
        )
        for own in part:
            self._host.note_written(own, lambda: self._target)

    @cached_property
    def _packed_places(self) -> Places:
        """Places of the source tokens in packed blocks."""
        return self._host.places_of(self._source, packed=True)

    def _angles(self, rotation: KeyRotation, num_heads: int = 0) -> Angles:
        """Return the angles of the shifts, laid out for `num_heads` heads unless that is 0.

        A draft model may have another number of heads.
        """
        if (rotation, num_heads) not in self._tables:
            found = rotation.angles(self._shifts)
            self._tables[rotation, num_heads] = (
                by_head(*found, num_heads) if found and num_heads else found
            )
        return self._tables[rotation, num_heads]
