"""Which channels tell which blocks matter: routing with groups of channels masked (Vortex, section
6.3)."""

from dataclasses import dataclass

from kvgraft.decode import Add, Caches, MaskSlice, Multiply, Selection, Value
from kvgraft.flows.block_topk import BlockTopK
from kvgraft.flows.quest import Quest


@dataclass(frozen=True)
class ChannelTopK(BlockTopK):
    """Block top-k by a query of which some groups of channels are masked.

    Attributes:
        groups: of equal size, into which the channels of a head are cut.
        masked: numbers of those that routing does not see.
    """

    name = "channel_topk"

    groups: int = 8
    masked: tuple[int, ...] = ()

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        return super().forward_indexer(_without(q, self.groups, self.masked), c)


@dataclass(frozen=True)
class ChannelQuest(Quest):
    """Quest by a query of which some groups of channels are masked; options as `channel_topk`."""

    name = "channel_quest"

    groups: int = 8
    masked: tuple[int, ...] = ()

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        return super().forward_indexer(_without(q, self.groups, self.masked), c)


def _without(q: Value, groups: int, masked: tuple[int, ...] | int) -> Value:
    """[1, g, d] with zeros in these groups of channels."""
    size = q.size(2) // groups
    for group in (masked,) if isinstance(masked, int) else masked:
        if not 0 <= group < groups:
            raise ValueError(f"masked must be groups from 0 to {groups - 1}, got {group}")
        q = Add(q, Multiply(MaskSlice(q, group * size, (group + 1) * size, dim=2), -1.0))
    return q
