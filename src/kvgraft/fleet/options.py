"""Command line and options of a fleet. This module does not import Ray, which takes seconds."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import msgspec

from kvgraft.fleet.ranking import IMBALANCE, ROUTINGS
from kvgraft.server.checks import HOST, PORT, address_reasons, check_arguments

# flags that the fleet itself sets for its servers
OWN = ("--host", "--port", "--uds")


class FleetOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a fleet; also the `args` of the application in a Ray Serve configuration file.

    Attributes:
        model: directory or name; None: the bundled model.
        arguments: any flags of `kvgraft serve`, the same for all servers.
        replicas: number of servers.
        autoscaling: Ray Serve's `autoscaling_config`, in place of `replicas`.
        cpus, gpus: of one server, as Ray counts them.
        ingresses: number of processes that accept requests.
        imbalance: load cap, see `Ranking`.
        routing: one of `ROUTINGS`; all but the first are for comparisons.
        sketch_s: seconds between two sketches of a server's contents.
        drain_s: seconds that running requests have when a server or the fleet ends.

    Raises:
        ValueError: a field is out of range.
    """

    model: str | None = None
    arguments: list[str] = []
    replicas: int = 2
    autoscaling: dict[str, Any] | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    ingresses: int = 1
    imbalance: float = IMBALANCE
    routing: str = ROUTINGS[0]
    sketch_s: float = 2.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the range of every field."""
        for name in ("replicas", "ingresses", "sketch_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")
        for name in ("cpus", "gpus", "drain_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")

        if self.routing not in ROUTINGS:
            raise ValueError(f"routing is {self.routing!r}, must be one of {', '.join(ROUTINGS)}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance is {self.imbalance}, must be at least 1")

        if {"--check", "--json"} & {*self.arguments}:
            raise ValueError("--check: ask `kvgraft serve --check` with the flags of the servers")
        if own := [flag for flag in self.arguments if flag.partition("=")[0] in OWN]:
            raise ValueError(f"{own[0]}: a fleet sees itself to where its servers listen")

    @property
    def command(self) -> list[str]:
        """Arguments of each server."""
        return [*([self.model] if self.model is not None else []), *self.arguments]


def read_command(arguments: Sequence[str]) -> tuple[FleetOptions, Namespace]:
    """Return the options of a fleet, and its `host`, `port` and Ray `address`, from a command line.

    Raises:
        ValueError: the arguments contradict each other, or cannot be served, as far as can be
            checked without vLLM.
    """
    args, rest = _parser().parse_known_args(list(arguments))
    options = _options(args, rest)
    _check(options, args)
    return options, args


def _check(options: FleetOptions, args: Namespace) -> None:
    """Refuse what can be checked within seconds, without vLLM.

    On a cluster nothing is checked, because paths and ports are those of other machines.
    """
    if args.address is None:
        if reasons := list(address_reasons(args.host, args.port)):
            raise ValueError("; ".join(reasons))
        check_arguments(options.command, listens=False)


def _options(args: Namespace, rest: Sequence[str]) -> FleetOptions:
    """Return the options in parsed arguments; other arguments go to the servers."""
    has_model = bool(rest) and not rest[0].startswith("-")
    given = {
        name: value for name, value in vars(args).items() if name not in ("host", "port", "address")
    }
    if (scaling := given["autoscaling"]) is not None:
        try:
            given["autoscaling"] = msgspec.json.decode(scaling, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(f"--autoscaling {scaling!r} is no JSON object: {error}") from error
    return FleetOptions(
        model=rest[0] if has_model else None, arguments=list(rest[has_model:]), **given
    )


def _parser() -> ArgumentParser:
    """Return the parser of the fleet's own flags."""
    parser = ArgumentParser(
        prog="kvgraft fleet",
        usage="kvgraft fleet [MODEL] [--replicas N] [options] [any flag of kvgraft serve]",
        description=(
            "Several servers behind one address; each prompt goes to where most of its text is "
            "known."
        ),
        allow_abbrev=False,
    )

    defaults = FleetOptions()
    parser.add_argument(
        "--replicas", type=int, default=defaults.replicas, help="Servers (default: %(default)s)."
    )
    parser.add_argument(
        "--autoscaling",
        metavar="JSON",
        help='Instead: the autoscaling_config of Ray Serve, {"max_replicas": 8, ...}.',
    )
    parser.add_argument(
        "--cpus", type=float, default=defaults.cpus, help="Of one server (default: %(default)s)."
    )
    parser.add_argument(
        "--gpus", type=float, default=defaults.gpus, help="Of one server (default: %(default)s)."
    )
    parser.add_argument(
        "--host", default=HOST, help="Where the fleet listens (default: %(default)s)."
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="And its port (default: %(default)s)."
    )
    parser.add_argument(
        "--address", help="Of a Ray cluster; by default one is started on this machine."
    )
    parser.add_argument(
        "--ingresses",
        type=int,
        default=defaults.ingresses,
        help="Processes that take requests (default: %(default)s).",
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        default=defaults.imbalance,
        help=(
            "Requests that a server may have in flight, as a multiple of the mean (default: "
            "%(default)s)."
        ),
    )
    parser.add_argument(
        "--routing",
        default=defaults.routing,
        help=(
            f"{', '.join(ROUTINGS)}: by all known text, by beginnings only, or by none (default: "
            "%(default)s)."
        ),
    )
    parser.add_argument(
        "--sketch-s",
        type=float,
        default=defaults.sketch_s,
        help="Seconds between sketches (default: %(default)s).",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=defaults.drain_s,
        help="Seconds that a server has to end (default: %(default)s)",
    )

    return parser
