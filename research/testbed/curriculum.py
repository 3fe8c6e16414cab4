"""What each stage of training reads: short texts and single facts first, then everything, then
longer texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft_lab.testbed.tasks import TASKS, Task

FIRST: tuple[Task, ...] = ("needle", "variable")


@dataclass(frozen=True)
class Stage:
    """Training steps of one kind.

    Attributes:
        steps: how many.
        length: tokens of the longest sequences; a quarter of the batches has sequences half as
            long.
        max_position: positions run up to here, by gaps between the segments of shorter sequences.
        rate: learning rate of the matrices at the first step of the stage, from where it moves to
            that of the next.
    """

    steps: int
    length: int
    rate: float
    tasks: tuple[Task, ...] = TASKS
    max_hops: int = 3
    max_position: int = 4600


STAGES = (
    Stage(150, 128, 2.5e-3, FIRST, max_hops=1, max_position=1024),
    Stage(350, 128, 2.5e-3, max_hops=2, max_position=2048),
    Stage(500, 256, 2.5e-3),
    Stage(1300, 512, 2.2e-3),
    Stage(800, 1024, 1.4e-3),
    Stage(300, 2048, 8e-4),
    Stage(150, 4096, 4e-4),
)
BY_HEAD = (  # from the bundled weights, see `by_head`
    Stage(1400, 512, 1e-3),
    Stage(1000, 1024, 7e-4),
    Stage(120, 2048, 3e-4),
    Stage(40, 4096, 2e-4),
)
LATENT = (  # from the bundled weights, see `research.vortex.latent_model`
    Stage(120, 512, 7e-4),
    Stage(50, 1024, 5e-4),
    Stage(25, 2048, 3e-4),
    Stage(25, 4096, 2e-4),
)
WARM_UP_STEPS = 60
LAST_RATE = 1e-4


def num_steps(stages: Sequence[Stage] = STAGES) -> int:
    """Of all stages."""
    return sum(stage.steps for stage in stages)
