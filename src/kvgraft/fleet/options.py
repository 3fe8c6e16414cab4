"""Command line and options of a fleet. This module does not import Ray, which takes seconds."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvgraft.fleet.ranking import IMBALANCE, ROUTINGS
from kvgraft.server.checks import HOST, PORT, LineParser, address_reasons, check_arguments
from kvgraft.setting_schema import (
    AMOUNT,
    POSITIVE,
    TEXT,
    ValueType,
    at_least,
    check_declared,
    declarations,
    list_of,
    one_of,
    setting,
)

# flags that the fleet itself sets for its servers
OWN = ("--host", "--port", "--uds")
# options without a flag: what else the command line holds
REST = ("model", "arguments")


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ArgumentTypeError(f"{text!r} is no JSON object: {error}") from error


@dataclass(frozen=True)
class FleetOptions:
    """Options of a fleet; also the `args` of the application in a Ray Serve configuration file.

    Raises:
        ValueError: a field is out of range.
    """

    model: str | None = setting(
        None,
        "directory or name of the model",
        "to serve a model of your own",
        TEXT,
        shown="the bundled model",
    )
    arguments: Sequence[str] = setting(
        (),
        "list of flags of `kvgraft serve`, the same for all servers",
        "to set them",
        list_of(TEXT, "a list of flags of `kvgraft serve`"),
        shown="none",
    )
    replicas: int = setting(
        2,
        "number of replicas",
        "for more load, or so that one may fail",
        at_least(1),
    )
    cpus: float = setting(
        1.0,
        "CPUs of one replica, as Ray counts them. On CPUs, also its number of threads",
        "to the cores that one replica may use",
        AMOUNT,
    )
    gpus: float = setting(
        0.0,
        "GPUs of one replica, as Ray counts them",
        "on GPUs: 1, or the product of the tensor-parallel and data-parallel sizes",
        AMOUNT,
    )
    autoscaling: dict[str, Any] | None = setting(
        None,
        "Ray Serve's `autoscaling_config` as JSON, in place of `--replicas`: "
        """`'{"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}'`""",
        "if the load varies",
        ValueType("a JSON object", lambda value: isinstance(value, dict), _json_object),
        shown="none",
    )
    routing: str = setting(
        ROUTINGS[0],
        "`segments` (all text), `prefixes` (beginnings only), `load` (the less loaded of two), "
        "`random`",
        "to compare",
        one_of(*ROUTINGS),
        shown=f"`{ROUTINGS[0]}`",
    )
    imbalance: float = setting(
        IMBALANCE,
        "load cap: a replica with more than this multiple of the mean number of running requests, "
        "plus one, is used last",
        "raise it for more reuse, lower it for more even load",
        ValueType("a number of at least 1", lambda value: AMOUNT.test(value) and value >= 1, float),
    )
    sketch_s: float = setting(2.0, "seconds between two sketches of a replica", "-", POSITIVE)
    drain_s: float = setting(
        60.0,
        "seconds that running requests have when a replica or the fleet ends",
        "if answers take longer",
        AMOUNT,
    )
    ingresses: int = setting(1, "processes that accept requests", "-", at_least(1))

    def __post_init__(self) -> None:
        """Check every field."""
        check_declared(self)
        if {"--check", "--json"} & {*self.arguments}:
            raise ValueError("--check: ask `kvgraft serve --check` with the flags of the servers")
        if own := [flag for flag in self.arguments if flag.partition("=")[0] in OWN]:
            raise ValueError(f"{own[0]}: a fleet sees itself to where its servers listen")

    @property
    def command(self) -> list[str]:
        """Arguments of each server."""
        return [*([self.model] if self.model is not None else []), *self.arguments]


@dataclass(frozen=True)
class FleetAddress:
    """Where a fleet of the command line listens, and on which Ray it runs."""

    host: str = setting(
        HOST,
        "address of the fleet. Without API keys it must be loopback, or `--kvgraft-single-tenant` "
        "must be set",
        "to open the fleet",
        TEXT,
        shown=HOST,
    )
    port: int = setting(PORT, "port of the fleet", "if it is in use", at_least(0), shown=str(PORT))
    address: str | None = setting(
        None,
        "address of a [running Ray cluster](#on-a-cluster)",
        "on a cluster",
        TEXT,
        shown="none: start Ray on this machine",
    )


def read_command(arguments: Sequence[str]) -> tuple[FleetOptions, FleetAddress]:
    """Return the options and the address of a fleet from a command line.

    Raises:
        ValueError: the arguments contradict each other, or cannot be served, as far as can be
            checked without vLLM.
    """
    options, address = parse_command(arguments)
    _check(options, address)
    return options, address


def parse_command(arguments: Sequence[str]) -> tuple[FleetOptions, FleetAddress]:
    """Return the options and the address in a command line, before the servers' flags are checked.
    Arguments that are no flags of a fleet go to the servers."""
    args, rest = make_parser().parse_known_args(list(arguments))
    has_model = bool(rest) and not rest[0].startswith("-")
    model = rest[0] if has_model else None
    options = FleetOptions(model, rest[has_model:], **_given(FleetOptions, args))
    return options, FleetAddress(**_given(FleetAddress, args))


def _given(options: type, args: Namespace) -> dict[str, Any]:
    """Return the values of the flags that were given, by the options that they set."""
    given = {name: getattr(args, name, None) for name in declarations(options)}
    return {name: value for name, value in given.items() if value is not None}


def _check(options: FleetOptions, address: FleetAddress) -> None:
    """Refuse what can be checked within seconds, without vLLM.

    On a cluster nothing is checked, because paths and ports are those of other machines.
    """
    if address.address is None:
        if reasons := list(address_reasons(address.host, address.port)):
            raise ValueError("; ".join(reasons))
        check_arguments(options.command, listens=False)


def make_parser() -> LineParser:
    """Return the parser of the fleet's own flags. A flag that was not given is None."""
    parser = LineParser(
        prog="kvgraft fleet",
        usage="kvgraft fleet [MODEL] [--replicas N] [options] [any flag of kvgraft serve]",
        description=(
            "Several servers behind one address; each prompt goes to where most of its text is "
            "known."
        ),
        epilog=(
            "Flags of the servers: kvgraft serve --help. Routing of recorded requests, without "
            "servers: kvgraft fleet simulate --help."
        ),
        add_help=False,
        allow_abbrev=False,
    )
    for name, declared in (declarations(FleetOptions) | declarations(FleetAddress)).items():
        if name not in REST:
            declared.add_flag(parser, flag_of(name))
    return parser


def flag_of(name: str) -> str:
    """Return the flag of an option, or its name if it has none."""
    return name if name in REST else f"--{name.replace('_', '-')}"
