"""A configuration that cannot be served is refused in one message, before anything loads; `--check`
starts nothing."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvgraft.server.checks import check_arguments, help_text
from kvgraft.server.flags import add_flags
from kvgraft.store.secret import CACHE_SECRET
from kvgraft_lab.testbed import MODEL_DIR

MOST_S = 5.0  # without other load; the machine of a test may be busy
SLACK = 4.0


def serve(*arguments: str, **environment: str) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds of a server that is to be refused, or only checked."""
    started = time.monotonic()
    command = [sys.executable, "-m", "kvgraft", "serve", *arguments]
    said = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | said, timeout=240, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr, time.monotonic() - started


def processes_with(name: str, value: str) -> Iterator[psutil.Process]:
    """Those that were started with this environment variable."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                yield process


def open_directory(folder: Path) -> list[str]:
    (folder / "store").mkdir(mode=0o755)
    (folder / "store").chmod(0o755)
    return ["--kvgraft-store-dir", str(folder / "store")]


def unwritable(folder: Path) -> list[str]:
    return ["--kvgraft-store-dir", "/proc/kvgraft/store"]  # not even root may write there


def unwritable_shared(folder: Path) -> list[str]:
    return [
        "--kvgraft-store-shared",
        "file:///proc/kvgraft",
        "--kvgraft-store-dir",
        str(folder / "store"),
    ]


def wrong_map(folder: Path) -> list[str]:
    (folder / "heads.json").write_text("{}")
    return ["--kvgraft-head-map", str(folder / "heads.json")]


def given(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _: list(arguments)


WRONG = [
    (open_directory, r"/store is open to others \(mode bits 055\): chmod 700"),
    (unwritable, "/proc/kvgraft/store: nothing can be written there"),
    (given("--port", "99999"), "--port 99999: allowed are 0 to 65535"),
    (
        given("--kv-cache-dtype", "fp8_inc"),
        "KV cache dtype fp8_inc .*: supported are auto, float16",
    ),
    (given("--pipeline-parallel-size=2"), "pipeline_parallel_size 2: .* .allowed is 1"),
    (
        given("--ssl-keyfile", "/no.key", "--ssl-certfile", "/no.pem"),
        "--ssl-keyfile /no.key: .*--ssl-certfile /no.pem",
    ),
    (given("--ssl-certfile", __file__), "no certificate and key that belong together"),
    (given("--kvgraft-policy", "sprad"), "unknown policy 'sprad'"),
    (given("--kvgraft-pin_quota", "2"), "pin_quota must be a share"),
    (
        given("--kvgraft-polcy", "naive"),
        "there is no flag --kvgraft-polcy: did you mean --kvgraft-policy",
    ),
    (given("--kvgraft-guard-tokens", "many"), "--kvgraft-guard-tokens: invalid int value: 'many'"),
    (wrong_map, "heads.json is no "),
    (unwritable_shared, "/proc/kvgraft: nothing can be written there"),
    (given("./no-model"), "there is no model ./no-model"),
    (given("nobody-knows-it"), "nobody-knows-it is not a model directory"),
    (given("--host", "10.0.0.1", "--port", "1"), "nothing can listen there.*loopback only"),
    (given("--uds", "/no/socket"), "there is no directory /no"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=[message[:30] for _, message in WRONG]
)
def test_a_wrong_configuration_is_refused_without_vllm(
    arguments: Callable[[Path], list[str]], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        check_arguments(arguments(tmp_path))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
def test_a_wrong_configuration_ends_in_seconds_with_one_line(number: int, tmp_path: Path):
    """As users start it: exit code 2, one line on stderr, nothing on stdout."""
    arguments, message = WRONG[number]
    code, out, err, seconds = serve(*arguments(tmp_path))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"kvgraft: .*{message}.*\n", err)
    assert seconds < MOST_S * SLACK


@pytest.mark.parametrize("secret", ["", "abc", "g" * 64])
def test_a_secret_that_is_none_is_refused_and_not_shown(secret: str):
    code, _, err, seconds = serve(**{CACHE_SECRET: secret})
    assert code == 2
    assert (
        err
        == f"kvgraft: {CACHE_SECRET} must be 64 hexadecimal digits, such as openssl rand -hex 32\n"
    )
    assert seconds < MOST_S * SLACK


def test_a_busy_port_is_refused():
    """Paired: a free one, also if somebody holds it for us without listening."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        check_arguments(["--port", port])
        other.listen()
        code, _, err, seconds = serve("--port", port)
    assert code == 2
    assert err == (
        f"kvgraft: --host 127.0.0.1 --port {port}: another process listens there; end it, or "
        "give another port\n"
    )
    assert seconds < MOST_S * SLACK


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(
        ValueError, match=r"--port -1: .*pipeline_parallel_size 3: .*KV cache dtype .*watermark"
    ):
        check_arguments(
            ["--port", "-1", "-pp", "3", "--kv_cache_dtype", "fp8_inc", "--kvgraft-watermark", "2"]
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "512", "--served-model-name", "a", "--kvgraft-watermark", "0.5"],
        ["--kvgraft-contin"],  # vLLM's parser takes what begins one flag
        # the file comes later, and may say another port
        ["--config", "server.yaml", "--port", "99999"],
        ["--no-kvgraft", "-pp", "2", "--kv-cache-dtype", "fp8_inc"],
        ["--kv-transfer-config", '{"kv_connector": "X"}', "--port", "0"],
        ["org/model", "--port", "0"],
        ["--help=KVGraft", "--port", "99999"],
    ],
    ids=" ".join,
)
def test_what_may_be_served_passes(arguments: list[str]):
    check_arguments([*arguments, *([] if "--port" in arguments else ["--port", "0"])])


def test_nothing_is_made_by_a_check(tmp_path: Path):
    check_arguments(["--port", "0", "--kvgraft-store-dir", str(tmp_path / "a" / "store")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_check_says_what_will_be_used_and_starts_nothing(tmp_path: Path):
    arguments = [
        "--check",
        "--port",
        "0",
        "--kvgraft-policy",
        "naive",
        "--kvgraft-store-ram-gib",
        "0.5",
    ]
    code, out, err, _ = serve(
        *arguments, "--json", "--kvgraft-store-dir", str(tmp_path / "store"), CHECKED=str(tmp_path)
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["uses"]["model"] == str(MODEL_DIR)
    assert found["uses"]["policy"] == "naive"
    assert found["uses"]["KV cache"] == "1.00 GiB, blocks of 32 tokens"
    assert found["uses"]["address"] == "http://127.0.0.1:0"
    assert found["uses"]["store"] == f"0.5 GiB of host memory, 16 GiB in {tmp_path / 'store'}"
    assert found["off"]["pins API"] == "no KVGRAFT_ADMIN_KEY"
    assert not (tmp_path / "store").exists()
    assert not list(processes_with("CHECKED", str(tmp_path)))

    code, out, _, _ = serve(*arguments)
    assert code == 0
    assert "0.5 GiB of host memory" in out
    assert "off: no --kvgraft-guard" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--max-model-len", "1000000"],
            r"vLLM refuses this configuration: User-specified max_model_len \(1000000\)",
        ),
        (
            ["--kvgraft-residual-layers", "99"],
            "the residual stream of layer 99: the model has fewer layers",
        ),
        (
            ["--tool-call-parser", "no-such", "--enable-auto-tool-choice"],
            "invalid tool call parser: no-such",
        ),
        (["--block-size", "many"], "argument --block-size: invalid"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_needs_vllm_to_be_seen_is_one_message_too(arguments: list[str], message: str):
    code, _, err, _ = serve(*arguments, "--port", "0")
    assert code == 2
    assert "Traceback" not in err
    assert re.search(message, err)


def test_help_names_our_flags_with_their_defaults():
    code, out, _, seconds = serve("-h")
    assert code == 0
    assert out == help_text()
    assert "--check" in out
    text = " ".join(out.split())
    assert re.search(r"--kvgraft-watermark KVGRAFT_WATERMARK .*? Default: 0.9\.", text)
    assert "default: None" not in text
    assert seconds < MOST_S * SLACK


def test_no_flag_of_ours_has_the_default_of_a_parser_in_its_help():
    """vLLM's parser adds the default to each help text that does not name it."""
    parser = ArgumentParser(prog="serve", formatter_class=ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    shown = " ".join(parser.format_help().split())
    assert "--kvgraft-watermark" in shown
    assert "(default: None)" not in shown
    assert "(default: )" not in shown
