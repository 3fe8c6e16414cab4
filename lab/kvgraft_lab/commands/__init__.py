"""Commands of the laboratory. Importing this package adds them to `kvgraft`."""

from kvgraft_lab.commands import (
    answers,
    calibrate,
    demo,
    flows,
    simulation,
    studies,
    traffic,
)

__all__ = ["answers", "calibrate", "demo", "flows", "simulation", "studies", "traffic"]
