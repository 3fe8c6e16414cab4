"""Checks that refuse a command line within seconds, before a model is loaded.

`check_arguments` reads a command line without importing vLLM. `check_parsed` repeats the checks
after vLLM has parsed the arguments.
"""

import difflib
import errno
import socket
import ssl
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from kvgraft.server.flags import add_flags
from kvgraft.server.keys import API_KEY, Keys, given_keys
from kvgraft.vllm.limits import cache_dtype_reasons, parallel_reasons

# default address of a server or a fleet router
HOST, PORT = "127.0.0.1", 8000
# prefixes of KVGraft's flags
OWN = ("--kvgraft-", "--no-kvgraft")
MAX_PORT = 65535


def check_arguments(arguments: Sequence[str], *, listens: bool = True) -> Namespace:
    """Refuse a command line of `kvgraft serve` that cannot be served, without importing vLLM.

    Args:
        listens: whether the server will listen at the address in the command line.

    Returns:
        The values of the flags that are known here.

    Raises:
        ValueError: the message lists every problem found.
    """
    dashed = [_dashed(argument) for argument in arguments]
    args, rest = make_parser().parse_known_args(dashed)
    flags = {argument.partition("=")[0] for argument in rest}
    _check_spelling(flags)
    if find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: pip install 'kvgraft[vllm]'")
    if flags & {"--config", "--help"}:
        # a configuration file may change the values; `check_parsed` sees the result
        return args

    has_model = bool(arguments) and not arguments[0].startswith("-")
    reasons = [*_model_reasons(arguments[0] if has_model else args.model), *_reasons(args, listens)]

    in_json = any(flag.startswith("--kv-transfer-config") for flag in flags)
    if not (args.no_kvgraft or in_json):
        reasons += _caught(_check_flags, args)

    _refuse(reasons)
    return args


def check_parsed(args: Namespace) -> None:
    """Repeat the checks of `check_arguments` on arguments that vLLM has parsed.

    Raises:
        ValueError: the message lists every problem found.
    """
    reasons = list(_reasons(args, listens=True))
    if not args.no_kvgraft:
        reasons += _caught(_check_settings, args.kv_transfer_config.kv_connector_extra_config)
    _refuse(reasons)


def address_reasons(host: str | None, port: int) -> Iterator[str]:
    """Yield why no server could listen at an address now.

    Args:
        host: None means all interfaces.
    """
    if not 0 <= port <= MAX_PORT:
        yield f"--port {port}: allowed are 0 to {MAX_PORT}"
        return

    family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    with socket.socket(family) as trial:
        # the option that servers set, too: it allows a port that was closed a moment ago
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host or "", port))
        except OSError as error:
            place = f"--host {host or '0.0.0.0'} --port {port}"  # noqa: S104
            if error.errno == errno.EADDRINUSE:
                yield f"{place}: another process listens there; end it, or give another port"
            else:
                yield f"{place}: nothing can listen there ({error.strerror}); give another address"


def help_text() -> str:
    """Return the text of `kvgraft serve -h`: KVGraft's flags with their defaults, and vLLM's
    checked flags."""
    return make_parser().format_help()


def make_parser() -> ArgumentParser:
    """Return a parser of KVGraft's flags and of the vLLM flags that are checked here.

    Its defaults are those of `kvgraft serve`.
    """
    parser = LineParser(
        prog="kvgraft serve",
        usage="kvgraft serve [MODEL] [options]",
        add_help=False,
        allow_abbrev=False,
    )
    add_flags(parser)

    group = parser.add_argument_group("Of vLLM", "These and all others: kvgraft serve --help=all")
    group.add_argument(
        "--model", help="Directory or name, as MODEL; default: bundled, of kvgraft-lab."
    )
    group.add_argument("--host", default=HOST, help="Where the server listens.")
    group.add_argument("--port", type=int, default=PORT, help="And its port.")
    group.add_argument("--uds", help="Instead: path of a Unix socket.")
    group.add_argument("--api-key", nargs="+", help="Each is a tenant; rather set VLLM_API_KEY.")
    for flag, text in (
        ("keyfile", "Key"),
        ("certfile", "Certificate"),
        ("ca-certs", "Authorities"),
    ):
        group.add_argument(f"--ssl-{flag}", help=f"{text} for TLS, a PEM file.")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8, ...")
    for short, name in (
        ("-pp", "pipeline"),
        ("-dcp", "decode-context"),
        ("-pcp", "prefill-context"),
    ):
        group.add_argument(short, f"--{name}-parallel-size", type=int, default=1, help="1 only.")

    return parser


class LineParser(ArgumentParser):
    """Argument parser that raises ValueError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with argparse's message."""
        raise ValueError(message)


def _dashed(argument: str) -> str:
    """Replace underscores in a flag's name by dashes, because vLLM accepts both."""
    flag, equals, value = argument.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else argument


def _check_spelling(unknown: Iterable[str]) -> None:
    """Refuse misspelled KVGraft flags.

    A unique abbreviation of a known flag is left to vLLM's parser.

    Raises:
        ValueError: a flag begins like KVGraft's flags and does not exist.
    """
    known = [flag for flag in make_parser()._option_string_actions if flag.startswith("--")]
    for flag in unknown:
        if not flag.startswith(OWN) or sum(name.startswith(flag) for name in known) == 1:
            continue
        near = difflib.get_close_matches(flag, known, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else "kvgraft serve -h lists them"
        raise ValueError(f"there is no flag {flag}: {hint}")


def _reasons(args: Namespace, listens: bool) -> Iterator[str]:
    """Yield why these arguments cannot be served, KVGraft's settings aside."""
    if listens and args.uds is None:
        yield from address_reasons(args.host, args.port)
    elif listens:
        yield from _socket_reasons(Path(args.uds))
    yield from _tls_reasons(args)
    yield from _caught(given_keys, "--api-key", args.api_key, API_KEY)
    if args.no_kvgraft:
        return
    if listens:
        yield from _caught(Keys.of, args)
    yield from parallel_reasons(args)
    skipped = getattr(args, "kv_cache_dtype_skip_layers", None) or ()
    yield from cache_dtype_reasons(args.kv_cache_dtype, skipped)


def _check_flags(args: Namespace) -> None:
    """Check the settings that flags give.

    Raises:
        OSError, ValueError: a setting cannot be used.
    """
    from kvgraft.vllm.settings import given_settings

    _check_settings(given_settings(args))


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check settings, and the files and directories that they name.

    Raises:
        OSError, ValueError: a setting cannot be used.
    """
    from kvgraft.kv.heads import HeadMap
    from kvgraft.store.secret import check_secret
    from kvgraft.vllm.settings import KVGraftSettings

    check_secret(None)
    settings = KVGraftSettings.parse(given)
    if settings.store is not None:
        settings.store.check_backends()
    if settings.head_map is not None:
        HeadMap.load(settings.head_map)


def _model_reasons(model: str | None) -> Iterator[str]:
    """Yield why there is no such model.

    A model that can be fetched counts as present. Names with a slash are left to vLLM.
    """
    from kvgraft.models import BUNDLED, KNOWN, find_model, is_name

    if model in KNOWN:
        return
    if model is None:
        model = BUNDLED
    if is_name(model):
        yield from _caught(find_model, model)
    elif model.startswith((".", "/")) and not Path(model).exists():
        yield f"there is no model {model}"


def _socket_reasons(path: Path) -> Iterator[str]:
    """Yield why no server can listen at this path of a Unix socket."""
    if path.exists():
        yield f"--uds {path}: there is such a file; if no server listens there, remove it"
    elif not path.parent.is_dir():
        yield f"--uds {path}: there is no directory {path.parent}"


def _tls_reasons(args: Namespace) -> Iterator[str]:
    """Yield why the TLS files cannot be used."""
    files = {
        f"--ssl-{n.replace('_', '-')}": getattr(args, f"ssl_{n}")
        for n in ("keyfile", "certfile", "ca_certs")
    }

    given = {flag: path for flag, path in files.items() if path is not None}
    missing = [f"{flag} {path}" for flag, path in given.items() if not Path(path).is_file()]
    yield from (f"{named}: there is no such file; give one in PEM format" for named in missing)
    if missing or not given:
        return

    if args.ssl_certfile is None:
        yield f"{' '.join(given)}: TLS needs --ssl-certfile, too"
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        named = ", ".join(f"{flag} {path}" for flag, path in given.items())
        yield f"{named}: no certificate and key that belong together, in PEM format ({error})"


def _caught(check: Callable[..., object], *args: Any) -> Iterator[str]:
    """Yield the error message of a check, if it fails."""
    try:
        check(*args)
    except OSError as error:
        yield str(error) if error.errno is None else f"{error.filename}: {error.strerror}"
    except ValueError as error:
        yield str(error)


def _refuse(reasons: Iterable[str]) -> None:
    """Raise ValueError with all reasons, each once, if there are any."""
    if found := list(dict.fromkeys(reasons)):
        raise ValueError("; ".join(found))
