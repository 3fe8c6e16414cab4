"""What a fleet may be given: every refusal names the option and what is allowed."""

import re
from typing import Any

import pytest

from kvgraft.fleet.options import FleetAddress, FleetOptions, make_parser, parse_command


def test_what_is_no_flag_of_a_fleet_goes_to_its_servers():
    options, address = parse_command(
        ["smollm2", "--replicas", "3", "--autoscaling", '{"max_replicas": 4}', "--api-key", "k"]
    )
    assert options == FleetOptions(
        "smollm2", ["--api-key", "k"], replicas=3, autoscaling={"max_replicas": 4}
    )
    assert options.command == ["smollm2", "--api-key", "k"]
    assert address == FleetAddress()
    assert parse_command(["--port", "9", "-tp", "2"]) == (
        FleetOptions(arguments=["-tp", "2"]), FleetAddress(port=9),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas must be an integer of at least 1, got 0"),
        ({"replicas": "2"}, "replicas must be an integer of at least 1, got '2'"),
        ({"ingresses": 0}, "ingresses must be an integer of at least 1, got 0"),
        ({"sketch_s": 0}, "sketch_s must be a number above 0, got 0"),
        ({"cpus": -1}, "cpus must be a number of at least 0, got -1"),
        ({"drain_s": float("nan")}, "drain_s must be a number of at least 0, got nan"),
        ({"imbalance": 0.5}, "imbalance must be a number of at least 1, got 0.5"),
        ({"routing": "best"}, "routing must be one of segments, prefixes, load, random, got"),
        ({"autoscaling": [1]}, "autoscaling must be a JSON object, got [1]"),
        ({"model": 3}, "model must be a string, got 3"),
        ({"arguments": "--api-key k"}, "arguments must be a list of flags of `kvgraft serve`, got"),
        ({"arguments": ["--port=9"]}, "--port=9: a fleet sees itself"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        FleetOptions(**given)


def test_a_value_that_no_flag_takes_is_refused_with_its_flag(capsys: pytest.CaptureFixture[str]):
    for flags, message in (
        (["--autoscaling", "8"], "argument --autoscaling: '8' is no JSON object"),
        (["--replicas", "two"], "argument --replicas: invalid int value: 'two'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_parser().parse_args(flags)
    # the command line prints one line, without a usage
    assert capsys.readouterr() == ("", "")
