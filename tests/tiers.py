"""Which tests start vLLM, which are for longer runs than `make test`, and which go to one process
of pytest-xdist."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
STARTERS = {  # what starts an engine or a server, by module and name; of `warm`, everything
    "engines.start_engine", "fleets.running_fleet", "hosts.Host", "processes.HostProcess",
    "running.running",
    "servers.start", "warm",
    "kvgraft.server.process.serving", "kvgraft_lab.evaluate.serving.run_serving_demo",
}  # fmt: skip
SHARED = {
    "engine_with_connector": "engine",
    "server": "server",
}  # fixtures of the session, and the group of their tests
MANY = 24  # cases of one test, above which `make test` takes some
VERY_MANY, EVERY = 48, 4  # values of one parameter, above which it takes every fourth
ALIKE = {"decode", "engine", "research"}  # folders of tests where those are alike: flows
Values = dict[pytest.Item, dict[str, str]]  # of the parameters of cases


def starts_vllm(item: pytest.Item) -> bool:
    """Whether a test or one of its fixtures starts an engine or a server, itself or through helpers
    of the tests."""
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs
    fixtures = [definitions[name][-1].func for name in item.fixturenames if name in definitions]
    seen: set[CodeType] = set()
    return any(_reaches(function, seen) for function in (item.function, *fixtures))


def _reaches(function: Any, seen: set[CodeType]) -> bool:
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    used = [
        function.__globals__[name]
        for name in _names(function.__code__)
        if name in function.__globals__
    ]
    if any(_name_of(value) in STARTERS for value in used):
        return True
    return any(_reaches(value, seen) for value in used if TESTS in Path(_file_of(value)).parents)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _name_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _file_of(value: Any) -> str:
    return value.__code__.co_filename if isinstance(value, FunctionType) else ""


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of tests with many that only `make test-soak` runs.

    `make test` takes every fourth value of a parameter with very many that are alike, and then so
    many cases that each value of a parameter meets each value of every other one, as far as they
    meet at all."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for some in cases.values():
        if len(some) > MANY:
            values = {
                item: {name: repr(value) for name, value in item.callspec.params.items()}
                for item in some
            }
            sampled = (
                _sampled(values) if some[0].path.relative_to(TESTS).parts[0] in ALIKE else values
            )
            taken = _covering(sampled)
            yield from (item for item in some if item not in taken)


def _sampled(values: Values) -> Values:
    """The cases with every fourth value of each parameter that has very many."""
    for name in next(iter(values.values())):
        found = [*dict.fromkeys(own[name] for own in values.values())]
        kept = found[::EVERY] if len(found) > VERY_MANY else found
        values = {item: own for item, own in values.items() if own[name] in kept}
    return values


def _covering(values: Values) -> set[pytest.Item]:
    """Always the case in which most pairs of values meet that do in no earlier one; all cases of a
    single parameter."""
    meeting = {item: set(combinations(sorted(own.items()), 2)) for item, own in values.items()}
    missing = set().union(*meeting.values())
    taken = set() if missing else set(values)
    while missing:
        best = max(meeting, key=lambda item: len(meeting[item] & missing))
        taken.add(best)
        missing -= meeting[best]
    return taken


def group_of(item: pytest.Item) -> str:
    """Tests that share an engine or a server go together, all others with their file."""
    names = getattr(item, "fixturenames", ())
    return next(
        (group for fixture, group in SHARED.items() if fixture in names),
        item.nodeid.partition("::")[0],
    )


def rank_of(item: pytest.Item) -> int:
    """What takes longest begins first."""
    groups = list(SHARED.values())
    group = group_of(item)
    return (
        groups.index(group)
        if group in groups
        else len(groups) + (item.get_closest_marker("vllm") is None)
    )
