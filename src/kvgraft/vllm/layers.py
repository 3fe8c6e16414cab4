"""vLLM's layers and blocks, for computing parts of documents."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.kernels.upload import upload
from kvgraft.prefill.context import Reduction
from kvgraft.prefill.documents.partial import Attend, LayerHost
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.ranks import over_ranks
from kvgraft.vllm.recovery_budget import RecoveryBudget


def embed(host: ModelHost, token_ids: Tensor) -> Tensor:
    """Return hidden states and (zero) residuals [n, 2, D] of token ids int64 [n]."""
    states = host.embed(*upload(host.device, token_ids))
    return torch.stack((states, torch.zeros_like(states)), dim=1)


def entering(index: int, halves: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return hidden state and residual [n, D] for a layer of vLLM.

    They are copies, because vLLM's fused norms write to their input. The first layer has no
    residual.
    """
    hidden, *residual = torch.stack(tuple(halves) if index else tuple(halves[:1]))
    return hidden, residual[0] if residual else None


class VllmLayers(LayerHost):
    """The loaded model and the blocks of one request.

    Hidden states are [n, 2, D], as `embed` gives them.

    Args:
        host: the loaded model and its cache.
        slots: int64 [n], slots of the request's blocks.
        budget: as in `VllmPrefill`.
    """

    def __init__(self, host: ModelHost, slots: Tensor, budget: RecoveryBudget) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = (
            host.num_layers,
            host.num_kv_heads,
            host.head_dim,
        )
        self.max_rows, self.dtype, self.device, self.rope = (
            host.max_rows,
            host.dtype,
            host.device,
            host.plain_rope,
        )
        self.scale = host.scale
        self._host, self._slots, self._budget = host, slots, budget

    def embed(self, token_ids: Tensor) -> Tensor:
        return embed(self._host, token_ids)

    def run(
        self, index: int, states: Tensor, positions: Tensor, rows: Tensor, attend: Attend
    ) -> Tensor:
        """Run one layer as in the protocol.

        vLLM's layer computes all rows outside of attention; only those set in `rows` are returned.
        """
        self._budget.spend(self._budget.rows(positions.numel()))

        def attend_all(query: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
            attended = attend(query, keys, values)
            if attended is None or bool(rows.all()):
                return attended
            every = torch.zeros_like(query)
            every[rows] = attended
            return every

        after = self._host.run_around(
            index, positions, *entering(index, states.unbind(1)), attend_all
        )
        return states[:0] if after is None else torch.stack(after, dim=1)[rows]

    def agree(self, values: Tensor, reduction: Reduction) -> Tensor:
        return over_ranks(values, reduction, self.device)

    def read(self, index: int, places: Tensor) -> tuple[Tensor, Tensor]:
        return self._host.read(index, self._slots[places])

    def write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        if places.numel():
            self._host.write(index, keys, values, self._slots[places])

    def close_up(self, num_kept: int, num_dropped: int) -> None:
        """Rotate the kept keys as if every token stood `num_dropped` positions earlier.

        vLLM continues at the position behind the last kept token. With this rotation all distances
        equal those in the whole prompt.
        """
        places = torch.arange(num_kept, device=self.device)
        turn = self._host.rotate_keys(torch.tensor([-num_dropped], device=self.device))
        for index in range(self.num_layers):
            self._budget.spend(self._budget.copy(num_kept))
            keys, values = self.read(index, places)
            self.write(index, places, turn(index, keys), values)
