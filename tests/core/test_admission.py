"""Admission over pages that are reclaimed in any order: what is promised to a prompt holds, and
hosts with the same history decide the same."""

from collections.abc import Iterator

import numpy as np
import pytest

from desks import AdmissionMachine, BareDesk, Desk, NativeDesk, check_waiting, exercise
from properties import examples

SMALL, LARGE = 24, 4000


class BarePoolMachine(AdmissionMachine):
    """The core with the least host that there can be, in a pool that reclaims all the time."""

    def make_desks(self) -> Iterator[Desk]:
        yield BareDesk(SMALL)


class NativePoolMachine(AdmissionMachine):
    """The native engine's memory."""

    def make_desks(self) -> Iterator[Desk]:
        yield NativeDesk(SMALL)


class EqualHostsMachine(AdmissionMachine):
    """Both of them, while nothing is reclaimed."""

    are_equal = True

    def make_desks(self) -> Iterator[Desk]:
        yield BareDesk(LARGE)
        yield NativeDesk(LARGE)


TestBarePool = BarePoolMachine.TestCase
TestNativePool = NativePoolMachine.TestCase
TestEqualHosts = EqualHostsMachine.TestCase
TestBarePool.settings = examples(40, stateful_step_count=25)
TestNativePool.settings = examples(40, stateful_step_count=25)
TestEqualHosts.settings = examples(40, stateful_step_count=25)


def test_a_decision_waits_until_its_prefix_or_a_source_changes():
    check_waiting(BareDesk(12))


@pytest.mark.parametrize("kind", [BareDesk, NativeDesk])
def test_requests_find_something(kind: type[BareDesk] | type[NativeDesk]):
    """Else the machines show less than they say."""
    assert min(exercise(kind(60), np.random.default_rng(0)).values()) > 10
