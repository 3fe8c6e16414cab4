"""Equal shares of a step's work, for sequences of any lengths (Vortex, section 5.1).

The units of all sequences (tiles of blocks or tokens) lie end to end. Every program takes the same
number of consecutive units. Several programs share a long sequence, and one program may have
several short ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload

# some programs compute while others wait for memory
PROGRAMS_PER_CORE = 4
# for devices on which programs run one after the other
FEW_PROGRAMS = 8
# padding of a part, as a share of its real entries
MOST_PADDING = 0.125
# padding entries of a part that cost no more than another call
FREE_PADDING = 2048


@dataclass(frozen=True, eq=False)
class Workload:
    """Units that each program takes.

    Attributes:
        chunks: int32 [n, 3], in order. A chunk is consecutive units of one sequence: the sequence,
            its first unit, and the number of units. There are `programs + S` chunks; some may be
            empty.
        programs: int32 [programs + 1], first chunk of each program.
        sequences: int32 [S + 1], first chunk of each sequence, for joining partial results.
    """

    chunks: Tensor
    programs: Tensor
    sequences: Tensor

    @property
    def num_programs(self) -> int:
        """Number of programs. It does not depend on the lengths."""
        return len(self.programs) - 1

    def to(self, device: torch.device) -> "Workload":
        """Return the workload on a device, in one copy."""
        return Workload(*upload(device, self.chunks, self.programs, self.sequences))


def plan_work(units: Tensor, programs: int) -> Workload:
    """Plan equal shares for `programs` programs, none more than one unit above the average.

    The plan is made on the device of `units`, without a synchronisation.

    Args:
        units: int64 [S], units of each sequence; S is at least 1.

    Raises:
        ValueError: no sequence, or no program.
    """
    if not len(units) or programs < 1:
        raise ValueError(f"there must be sequences and programs, got {len(units)} and {programs}")

    ends = units.cumsum(0)
    starts, total = ends - units, ends[-1:]
    share = (total + programs - 1) // programs
    begins = (torch.arange(programs, device=units.device) * share).minimum(total)

    # each chunk goes from one cut to the next
    cuts = torch.cat((starts, begins)).sort().values
    sequence = torch.searchsorted(ends, cuts, right=True).clamp(max=len(units) - 1)
    chunks = torch.stack(
        (sequence, cuts - starts[sequence], torch.cat((cuts, total)).diff()), dim=1
    )

    bounds = [
        torch.searchsorted(cuts, torch.cat((first, total))).int() for first in (begins, starts)
    ]
    return Workload(chunks.int(), *bounds)


def programs_of(device: torch.device) -> int:
    """Return the number of programs that fill a device."""
    if device.type != "cuda":
        return FEW_PROGRAMS
    return PROGRAMS_PER_CORE * int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Number of entries of each sequence in a step, and the plans that all layers share.

    Attributes:
        counts: int64 [S].
        known: the same on the CPU, if the host knows them: then it makes each plan and uploads it
            in one copy.
    """

    counts: Tensor
    known: Tensor | None = None

    def times(self, factor: int) -> "Lengths":
        """Return these lengths, each `factor` times as long."""
        if self.known is None:
            return Lengths(self.counts * factor)
        known = self.known * factor
        return Lengths(upload(self.counts.device, known)[0], known)

    @memoised
    def work(self, unit: int, share: int, plan: Callable[[Tensor, int, int], Workload]) -> Workload:
        """Return the plan for units of `unit` entries.

        Args:
            share: number of kernels of equal work that divide the device's programs.
            plan: makes a plan on the device from counts, entries of a unit and programs, if the
                host does not know the counts.
        """
        programs = max(1, programs_of(self.counts.device) // share)
        if self.known is None:
            return plan(self.counts, unit, programs)
        return plan_work((self.known + unit - 1) // unit, programs).to(self.counts.device)


def parts_of(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Divide sequences into parts that batched torch computes together.

    Returns:
        Consecutive sequences of each part, and the length of the longest. A part is as large as
        little padding allows. Empty parts are left out.
    """
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
