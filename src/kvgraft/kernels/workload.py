"""The work of a step in equal shares, whatever the lengths of its sequences (Vortex, section 5.1).

The units of all sequences (tiles of blocks or tokens) lie end to end, and every program takes as
many consecutive ones: several programs share a long sequence, and one program may have several
short ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload

PROGRAMS_PER_CORE = 4  # so that some compute while others wait for memory
FEW_PROGRAMS = 8  # where programs run in turn
MOST_PADDING = 0.125  # of a part, beside what is there
FREE_PADDING = 2048  # entries of a part that take no longer than another call


@dataclass(frozen=True, eq=False)
class Workload:
    """Which units each program takes.

    Attributes:
        chunks: int32 [n, 3], consecutive units of one sequence: the sequence, its first unit, how
            many; in order. There are `programs + S` of them, of which some may hold nothing.
        programs: int32 [programs + 1], where the chunks of each program begin among all.
        sequences: int32 [S + 1], where those of each sequence do: partial results to be joined.
    """

    chunks: Tensor
    programs: Tensor
    sequences: Tensor

    @property
    def num_programs(self) -> int:
        """Programs that there are, whatever the lengths."""
        return len(self.programs) - 1

    def to(self, device: torch.device) -> "Workload":
        """The same on a device, in one copy."""
        return Workload(*upload(device, self.chunks, self.programs, self.sequences))


def plan_work(units: Tensor, programs: int) -> Workload:
    """Shares for so many programs, none more than one unit above the average, where the lengths
    are: without a synchronisation.

    Args:
        units: int64 [S], of each sequence; S is at least 1.

    Raises:
        ValueError: no sequence, or no program.
    """
    if not len(units) or programs < 1:
        raise ValueError(f"there must be sequences and programs, got {len(units)} and {programs}")
    ends = units.cumsum(0)
    starts, total = ends - units, ends[-1:]
    share = (total + programs - 1) // programs
    begins = (torch.arange(programs, device=units.device) * share).minimum(total)
    cuts = torch.cat((starts, begins)).sort().values  # a chunk from each to the next
    sequence = torch.searchsorted(ends, cuts, right=True).clamp(max=len(units) - 1)
    chunks = torch.stack(
        (sequence, cuts - starts[sequence], torch.cat((cuts, total)).diff()), dim=1
    )
    bounds = [
        torch.searchsorted(cuts, torch.cat((first, total))).int() for first in (begins, starts)
    ]
    return Workload(chunks.int(), *bounds)


def programs_of(device: torch.device) -> int:
    """Programs that fill a device."""
    if device.type != "cuda":
        return FEW_PROGRAMS
    return PROGRAMS_PER_CORE * int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, eq=False)
class Lengths:
    """How many entries each sequence of a step has, and the plans that all layers of the step
    share.

    Attributes:
        counts: int64 [S].
        known: the same on the CPU, if the host knows them: then it makes the plans, in one copy
            each.
    """

    counts: Tensor
    known: Tensor | None = None

    @memoised
    def work(self, unit: int, share: int, plan: Callable[[Tensor, int, int], Workload]) -> Workload:
        """For units of so many entries, and programs that each of `share` kernels of equal work can
        have.

        Args:
            plan: makes a plan on the device of (counts, entries of a unit, programs), if the host
                does not know them.
        """
        programs = max(1, programs_of(self.counts.device) // share)
        if self.known is None:
            return plan(self.counts, unit, programs)
        return plan_work((self.known + unit - 1) // unit, programs).to(self.counts.device)


def parts_of(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Consecutive sequences that batched torch computes together, and the length of the longest: as
    many as can be without much padding. Parts that are empty are left out."""
    parts: list[tuple[slice, int]] = []
    first, total, most = 0, 0, 0
    for number, length in enumerate(lengths):
        longest = max(most, length)
        padding = longest * (number + 1 - first) - total - length
        if padding > max((total + length) * MOST_PADDING, FREE_PADDING):
            parts.append((slice(first, number), most))
            first, total, longest = number, 0, length
        total, most = total + length, longest
    parts.append((slice(first, len(lengths)), most))
    return [(rows, most) for rows, most in parts if most]
