"""Approximate prefix cache: a prompt that begins with all tokens of an earlier one continues from
its KV, exact or not."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)  # key of a block in the host's cache


@dataclass(frozen=True)
class Continued(Generic[K]):
    """Approximate blocks that a prompt continues from, behind its first `first_block` exact blocks.

    Attributes:
        keys: their keys in the host's cache.
        depths: depths of their KV, see `Match`.
        grafted: for each block whether it holds grafted tokens. The others were computed behind
            grafts.
    """

    first_block: int
    keys: tuple[K, ...]
    depths: tuple[int, ...]
    grafted: tuple[bool, ...]

    @property
    def stop_block(self) -> int:
        """The first block behind the continued ones."""
        return self.first_block + len(self.keys)

    @property
    def grafted_blocks(self) -> list[int]:
        """Numbers of the blocks that hold grafted tokens."""
        return [block for block, grafted in enumerate(self.grafted, self.first_block) if grafted]

    def steps(self, block_size: int) -> list[tuple[int, int]]:
        """Depth steps of a continuing prompt: see `BlockProvenance.mark_approximate`. There is one
        step for each new depth."""
        steps: list[tuple[int, int]] = []
        for block, depth in enumerate(self.depths, self.first_block):
            if not steps or depth > steps[-1][1]:
                steps.append((block * block_size, depth))
        return steps


class ApproximatePrefixCache(Generic[K]):
    """Approximate blocks, found by the whole text up to their end. The host's own prefix cache
    finds exact ones.

    The key of a block is its tokens, all tokens before it, and the block that it was computed
    behind. So a prompt follows the blocks of one conversation, and never a mixture of two.

    Args:
        is_cached: whether the host's cache still has a block under this key.
        capacity: blocks of the host's cache. At most twice this number is remembered, including
            dead ones.
    """

    def __init__(self, is_cached: Callable[[K], bool], capacity: int) -> None:
        self._is_cached = is_cached
        self._num_lost = 0
        self._capacity = 2 * capacity
        # by preceding block and chain
        self._blocks: dict[tuple[Hashable, bytes], tuple[K, int, bool]] = {}

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
    ) -> int:
        """Let prompts continue from blocks first_block, ... of a text. Return how many of them
        prompts can reach.

        If other live blocks are known for the same text, prompts follow those, and adding stops
        there.

        Args:
            root: what prompts must share in addition to tokens and namespace: how they recover
                reused KV.
            chains: `chain_hashes` of all its blocks.
            first_block: the first approximate one.
            keys, depths, grafted: of this block and those behind it, see `Continued`.
        """
        before: Hashable = root
        blocks = zip(chains[first_block:], keys, depths, grafted, strict=False)
        for count, (chain, key, depth, is_grafted) in enumerate(blocks):
            known = self._blocks.get((before, chain))
            if known is not None and known[0] != key and self._is_cached(known[0]):
                return count
            if known is None or known[0] != key:
                self._blocks[before, chain] = key, depth, is_grafted
            before = key

        if len(self._blocks) > self._capacity:
            self._blocks = {
                place: block for place, block in self._blocks.items() if self._is_cached(block[0])
            }

        return len(keys)

    def find(
        self, root: Hashable, chains: Sequence[bytes], num_exact: int, exactness_weight: float = 0.0
    ) -> Continued[K] | None:
        """Return the blocks that reach furthest behind a prompt's num_exact exact ones, or None.

        Args:
            root, chains: as in `add`, for the blocks that the prompt may use.
            exactness_weight: approximate blocks that must be won for each exact block that is given
                up, see `CostModel`.
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
        """Return the number of blocks that prompts would have continued from if they had not been
        reclaimed, since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def _follow(self, before: Hashable, chains: Sequence[bytes]) -> Iterator[tuple[K, int, bool]]:
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
        """Drop a reclaimed block and all blocks behind it, since no prompt can reach those."""
        while (block := self._blocks.pop((before, chain), None)) is not None:
            self._num_lost += 1
            before, chain = block[0], next(following, b"")
