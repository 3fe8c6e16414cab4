"""KVGraft's flags of `kvgraft serve`, in addition to vLLM's. This module does not import vLLM."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from kvgraft.core.options import AttentionFields
from kvgraft.setting_schema import SAYS_DEFAULT, declarations
from kvgraft.vllm.setting_fields import SettingFields

# of the attributes that hold KVGraft's flags after parsing
PREFIX = "kvgraft_"
SHARE = "--kvgraft-share"
TENANT = "--kvgraft-tenant"


def add_flags(parser: ArgumentParser) -> None:
    """Add all flags of KVGraft to a parser.

    A flag that was not given is None, because the defaults are those of `KVGraftSettings`.
    """
    group = parser.add_argument_group("KVGraft", "Reuse of known text at any position.")
    group.add_argument(
        "--check",
        action="store_true",
        help="Load nothing: check the configuration, print what will be used, and end.",
    )
    group.add_argument("--json", action="store_true", help="With --check: print it as JSON.")
    for name, declared in declarations(SettingFields).items():
        declared.add_flag(group, flag_of(name))
    attention = declarations(AttentionFields)
    attention["head_paging"].add_flag(group, "--kvgraft-head-paging")
    _add_owners(group)
    attention["flow"].add_flag(group, "--flow", "--kvgraft-flow", dest="kvgraft_flow")
    group.add_argument(
        "--kvgraft-engine-timeout",
        type=_seconds,
        metavar="SECONDS",
        help=(
            "Without an answer of the engine after which /health says 503; 0: never. Default: 120, "
            f"on CPUs 330.{SAYS_DEFAULT}"
        ),
    )
    group.add_argument(
        "--no-kvgraft",
        action="store_true",
        help="Plain vLLM with the same defaults, for comparisons.",
    )


def _seconds(text: str) -> float:
    """Return a number of seconds, 0 or more, from the text of a flag."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return seconds


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--kvgraft-{name.replace('_', '-')}"


def _add_owners(group: Any) -> None:
    """Add the flags about tenants: the admin key, shared namespaces and single-tenant servers."""
    group.add_argument(
        "--kvgraft-admin-key",
        help=f"Key of the pins API; better: set KVGRAFT_ADMIN_KEY.{SAYS_DEFAULT}",
    )
    group.add_argument(
        SHARE,
        action="append",
        metavar="NAME=KEY,KEY",
        help=(
            "Let these API keys (or their labels; *: all) graft from a namespace that the admin "
            f"fills; repeatable.{SAYS_DEFAULT}"
        ),
    )
    group.add_argument(
        TENANT,
        action="append",
        metavar="NAME=KEY",
        help=(
            "Name the tenant of an API key (or of its label) for the page and the pins API; "
            f"repeatable.{SAYS_DEFAULT}"
        ),
    )
    group.add_argument(
        "--kvgraft-single-tenant",
        action="store_true",
        help="All callers share one cache.",
    )
