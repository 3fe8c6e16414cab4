"""Prompts that begin with all the tokens of an earlier one, and go on with its KV as it stands,
exact or not."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvgraft.reuse.readings import WHOLE, Span

K = TypeVar("K", bound=Hashable)  # key of a block in the host's cache


@dataclass(frozen=True)
class Continued(Generic[K]):
    """Approximate blocks that a prompt goes on with, behind its first `first_block` blocks, which
    are exact.

    Attributes:
        keys: under which the host's cache has them.
        depths: of their KV, see `Match`.
        grafted: which of them hold tokens that were grafted; the others were computed, behind
            grafts.
        sources: of the requests that have left them, see `BlockProvenance.source`.
    """

    first_block: int
    keys: tuple[K, ...]
    depths: tuple[int, ...]
    grafted: tuple[bool, ...]
    sources: tuple[int, ...]

    @property
    def spans(self) -> list[Span]:
        """What a prompt was read behind that goes on with it: see `Readings.add`."""
        return [(source, 0, WHOLE) for source in dict.fromkeys(self.sources)]

    @property
    def stop_block(self) -> int:
        """The first block that it does not have."""
        return self.first_block + len(self.keys)

    @property
    def grafted_blocks(self) -> list[int]:
        """Those of its blocks that hold tokens which were grafted."""
        return [block for block, grafted in enumerate(self.grafted, self.first_block) if grafted]

    def steps(self, block_size: int) -> list[tuple[int, int]]:
        """What a prompt rests on that goes on with it: see `BlockProvenance.mark_approximate`. A
        step for each new depth."""
        steps: list[tuple[int, int]] = []
        for block, depth in enumerate(self.depths, self.first_block):
            if not steps or depth > steps[-1][1]:
                steps.append((block * block_size, depth))
        return steps


class ApproximatePrefixCache(Generic[K]):
    """Approximate blocks by the whole text up to their end. Exact ones are found by the host's own
    prefix cache.

    A block is known by its tokens, all tokens before it, and the very block that it was computed
    behind: so a prompt follows what one conversation has left, and never a mixture of two.

    Args:
        is_cached: whether the host's cache still has a block under this key.
        capacity: blocks known at most, dead ones counted; those of the host's cache.
    """

    def __init__(self, is_cached: Callable[[K], bool], capacity: int) -> None:
        self._is_cached = is_cached
        self._num_lost = 0
        self._capacity = 2 * capacity
        # by block before and chain
        self._blocks: dict[tuple[Hashable, bytes], tuple[K, int, bool, int]] = {}

    def __len__(self) -> int:
        """Blocks known, live and dead."""
        return len(self._blocks)

    def add(
        self,
        root: Hashable,
        chains: Sequence[bytes],
        first_block: int,
        keys: Sequence[K],
        depths: Sequence[int],
        grafted: Sequence[bool],
        source: int,
    ) -> int:
        """Let prompts go on with blocks first_block, ... of a text; how many of them: where others
        have been left for the same text already, prompts follow those.

        Args:
            root: what prompts must share beside their tokens and namespace: how they recover what
                is reused.
            chains: `chain_hashes` of all its blocks.
            first_block: the first approximate one.
            keys, depths, grafted: of this block and those behind it, see `Continued`.
            source: of the request.
        """
        before: Hashable = root
        blocks = zip(chains[first_block:], keys, depths, grafted, strict=False)
        for count, (chain, key, depth, is_grafted) in enumerate(blocks):
            known = self._blocks.get((before, chain))
            if known is not None and known[0] != key and self._is_cached(known[0]):
                return count
            if known is None or known[0] != key:
                self._blocks[before, chain] = key, depth, is_grafted, source
            before = key
        if len(self._blocks) > self._capacity:
            self._blocks = {
                place: block for place, block in self._blocks.items() if self._is_cached(block[0])
            }
        return len(keys)

    def find(
        self, root: Hashable, chains: Sequence[bytes], num_exact: int, exactness_weight: float = 0.0
    ) -> Continued[K] | None:
        """The blocks that reach furthest behind a prompt's num_exact exact ones, or None if there
        are none.

        Args:
            root, chains: as those of `add`, of the blocks that the prompt may take.
            exactness_weight: blocks that must be won for each exact one that is given up, see
                `CostModel`.
        """
        best: Continued[K] | None = None
        for first in range(min(num_exact, len(chains) - 1), -1, -1):
            path = (
                list(self._follow(root, chains[first:]))
                if (root, chains[first]) in self._blocks
                else []
            )
            least_stop = num_exact + max(1.0, exactness_weight * (num_exact - first))
            if path and first + len(path) >= max(least_stop, best.stop_block + 1 if best else 0):
                best = Continued(first, *zip(*path, strict=True))
        return best

    def take_lost(self) -> int:
        """Blocks that prompts would have gone on with, had they not been reclaimed; since the last
        call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def _follow(
        self, before: Hashable, chains: Sequence[bytes]
    ) -> Iterator[tuple[K, int, bool, int]]:
        following = iter(chains)
        for chain in following:
            block = self._blocks.get((before, chain))
            if block is None:
                return
            if not self._is_cached(block[0]):
                self._lose(before, chain, following)
                return
            yield block
            before = block[0]

    def _lose(self, before: Hashable, chain: bytes, following: Iterator[bytes]) -> None:
        """A block has been reclaimed, so nobody goes on with those behind it, either."""
        while (block := self._blocks.pop((before, chain), None)) is not None:
            self._num_lost += 1
            before, chain = block[0], next(following, b"")
