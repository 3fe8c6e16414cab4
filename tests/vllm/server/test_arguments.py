from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gguf_files import known_model, make_gguf
from kvgraft.engine.config import load_config
from kvgraft.models import KNOWN, get_model
from kvgraft.policies.profile import POLICY_FILE, MeasuredPolicy, PolicyProfile
from kvgraft.server.arguments import KNOWN_KV_BYTES, parse
from kvgraft.server.keys import ADMIN_KEY, API_KEY, RESPONSES_STORE, SINGLE_TENANT, Keys
from kvgraft.server.serve import PLUGINS, allowed_plugins
from kvgraft.server.server_state import ServerState
from kvgraft.vllm.compat import CONNECTOR, CONNECTOR_MODULE, WORKER_CLASS
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft_lab.testbed import MODEL_DIR
from models import link_model


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in (ADMIN_KEY, API_KEY, RESPONSES_STORE, SINGLE_TENANT, PLUGINS):
        monkeypatch.delenv(name, raising=False)


def test_without_arguments_the_bundled_model_is_served_on_loopback_with_reuse():
    args = parse([])
    assert (args.model, args.host, args.block_size) == (str(MODEL_DIR), "127.0.0.1", 32)
    assert args.served_model_name == ["bundled"]
    assert args.enforce_eager
    # no page of another site may ask a server that asks for no key
    assert args.allowed_origins == []
    assert args.enable_prompt_tokens_details
    assert args.enable_prefix_caching is True
    assert args.worker_cls == WORKER_CLASS
    config = args.kv_transfer_config
    assert (config.kv_connector, config.kv_connector_module_path) == (CONNECTOR, CONNECTOR_MODULE)
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "recompute")
    assert config.kv_connector_extra_config == {}


def test_what_the_user_says_counts():
    args = parse(
        [
            "some/model",
            "--block-size",
            "64",
            "--host",
            "10.0.0.1",
            "--api-key",
            "a",
            "b",
            "--no-enforce-eager",
        ]
    )
    assert (args.model, args.block_size, args.host) == ("some/model", 64, "10.0.0.1")
    assert not args.enforce_eager
    assert args.served_model_name is None
    assert args.kv_cache_memory_bytes is None
    assert Keys.of(args).api_keys == ("a", "b")
    assert parse(["--model", "some/model"]).model == "some/model"


def words(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple) else value


def test_each_setting_of_the_connector_has_a_flag_that_arrives(tmp_path: Path):
    settings = {
        "policy": "sparsex:recompute_share=0.2",
        "head_map": str(tmp_path / "heads.json"),
        "match": "similar:tau=0.5",
        "residual_layers": [2, 3],
        "continuation": False,
        "max_depth": 2,
        "require_clean_context": True,
        "watermark": 0.5,
        "pin_capacity": 0.25,
        "pin_quota": 0.5,
        "store_dir": str(tmp_path),
        "store_ram_gib": 0.5,
        "store_disk_gib": 1.5,
        "store_quota": 0.5,
        "store_int8": True,
        "store_shared": f"file://{tmp_path / 'shared'}",
        "store_shared_timeout": 0.25,
        "store_shared_gib": 2.0,
        "costs": "tokens",
        "exactness_weight": 0.3,
        "idle_refresh": 0.05,
        "document_gib": 0.5,
        "mode": "live",
        "guard": 0.02,
        "guard_target": "kl=0.05",
        "guard_tokens": 1000,
        "exact_for": ("tools", "json"),
        "allow_untested": True,
    }
    assert {*settings, "profile"} == {field.name for field in fields(KVGraftSettings)}
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--kvgraft-{flag}" if value else f"--no-kvgraft-{flag}")
        else:
            flags += [
                f"--kvgraft-{flag}",
                *map(str, value if isinstance(value, list) else [words(value)]),
            ]
    assert parse(flags).kv_transfer_config.kv_connector_extra_config == settings


def test_keys_come_from_flags_and_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY, "from the environment")
    monkeypatch.setenv(ADMIN_KEY, "admin from the environment")
    assert Keys.of(parse([])) == Keys(("from the environment",), "admin from the environment")
    given = parse(["--api-key", "a", "--kvgraft-admin-key", "b"])
    assert Keys.of(given) == Keys(("a",), "b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", ""], "--api-key is empty: give a key"),
        (["--api-key", "a", ""], "--api-key is empty: give a key"),
        (["--kvgraft-admin-key", ""], "--kvgraft-admin-key is empty: give a key"),
        (["--api-key", "a", "--kvgraft-admin-key", ""], "--kvgraft-admin-key is empty: give a key"),
        (["--no-kvgraft", "--api-key", ""], "--api-key is empty: give a key"),
    ],
)
def test_an_empty_key_is_refused_not_taken_for_none(flags: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(flags)


@pytest.mark.parametrize("variable", [API_KEY, ADMIN_KEY])
def test_an_empty_key_in_the_environment_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "")
    with pytest.raises(
        ValueError, match=f"{variable} is empty: give a key, or do without {variable}"
    ):
        parse([])
    flag, expected = (
        ("--api-key", Keys(("k",)))
        if variable == API_KEY
        else ("--kvgraft-admin-key", Keys((), "k"))
    )
    assert Keys.of(parse([flag, "k"])) == expected, "a flag counts before the variable"


@pytest.mark.parametrize("asked", ["--kvgraft-single-tenant", SINGLE_TENANT])
def test_one_tenant_beyond_loopback_must_be_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="give API keys, or say --kvgraft-single-tenant"):
        parse(["--host", "10.0.0.1"])
    if asked == SINGLE_TENANT:
        monkeypatch.setenv(asked, "1")
    assert (
        parse(["--host", "10.0.0.1", *([asked] if asked.startswith("-") else [])]).host
        == "10.0.0.1"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching: reuse finds its sources"),
        (["--worker-cls", "other.Worker"], "--worker-cls other.Worker: ours is"),
        (["--api-server-count", "2"], "one process only"),
        (["--data-parallel-rank", "0"], "--data-parallel-rank: this server starts all engines"),
        (
            ["--data-parallel-size", "4", "--data-parallel-size-local", "2"],
            "--data-parallel-size-local: this server starts all engines itself",
        ),
        (
            ["--data-parallel-size", "2", "--data-parallel-backend", "ray"],
            "--data-parallel-backend ray: only mp",
        ),
        (["--enable-elastic-ep"], "--enable-elastic-ep: the number of engines"),
        (["--headless"], "pass by our middleware"),
        (["--grpc"], "pass by our middleware"),
        (["--trust-remote-code"], "--trust-remote-code: this server runs no code"),
        (["--trust-request-chat-template"], "--trust-request-chat-template: "),
        (["--enable-prompt-embeds"], "--enable-prompt-embeds: "),
        (
            ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
            "names 'NixlConnector': one connector at a time",
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "MultiConnector", "kv_role": "kv_both", '
                '"kv_connector_extra_config": {"connectors": '
                f'[{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}]}}}}',
            ],
            "names 'MultiConnector': one connector at a time",
        ),
        (
            ["--kv-offloading-size", "1"],
            "--kv-offloading-size: it puts another connector in the place of ours",
        ),
        (
            [
                "--kvgraft-policy",
                "naive",
                "--kv-transfer-config",
                f'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}',
            ],
            "not in both",
        ),
        (["--kvgraft-policy", "magic"], "unknown policy 'magic'"),
        (["--kvgraft-watermark", "2"], "watermark must be a share"),
        (["--kvgraft-watermark", "0"], "watermark must be a share above 0"),
        (["--kvgraft-pin-quota", "0"], "pin_quota must be a share above 0"),
        (["--kvgraft-guard", "0.1", "--enable-sleep-mode"], "must not score"),
        (["--kvgraft-guard", "0.1", "--max-logprobs", "5"], "--max-logprobs of at least 20, got 5"),
        (
            ["--kvgraft-guard", "0.1", "--logprobs-mode", "processed_logprobs"],
            "not by --logprobs-mode processed_logp",
        ),
        (
            [
                "--kvgraft-guard",
                "0.1",
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 2}',
            ],
            "drafts .* would stand in the answers",
        ),
        (
            [
                "--max-logprobs",
                "5",
                "--kv-transfer-config",
                f'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both", '
                '"kv_connector_extra_config": '
                '{"guard": 0.1}}',
            ],
            "--max-logprobs of at least 20, got 5",
        ),
        (["--kvgraft-guard", "1.5"], "guard must be a share"),
        (["--kvgraft-guard-target", "flips=0.01"], "needs a guard above 0"),
        (
            [
                "--kvgraft-guard",
                "0.1",
                "--kvgraft-guard-target",
                "flips=0.01",
                "--kvgraft-mode",
                "shadow",
            ],
            "mode shadow has nothing to cut back",
        ),
        (["--kvgraft-pin-quota", "1.5"], "pin_quota must be a share"),
        (
            ["--no-kvgraft", "--kvgraft-watermark", "0"],
            "--no-kvgraft does not go with --kvgraft-watermark",
        ),
        (["--api-key", "a", "--kvgraft-admin-key", "a"], "must differ"),
        (["--api-key", "a", "--kvgraft-single-tenant"], "for a server without API keys"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_several_conflicts_are_all_named():
    with pytest.raises(ValueError, match=r"one process only.*--headless"):
        parse(["--headless", "--api-server-count", "2"])


@pytest.mark.parametrize("variable", ["VLLM_USE_RUST_FRONTEND", RESPONSES_STORE])
def test_what_would_pass_by_the_tenants_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch):
    assert parse(["--api-key", "a", "b"])
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=variable):
        parse(["--api-key", "a", "b"])


def test_plain_vllm_differs_in_the_connector_and_the_worker_only():
    ours, plain = vars(parse([])), vars(parse(["--no-kvgraft"]))
    different = {name for name in ours if ours[name] != plain[name]}
    assert different == {"no_kvgraft", "kv_transfer_config", "worker_cls", "enable_prefix_caching"}
    assert plain["kv_transfer_config"] is None
    assert plain["worker_cls"] == "auto"
    assert plain["enable_prefix_caching"] is not False


def test_our_plugin_is_allowed_and_no_other_is_taken_away():
    assert allowed_plugins("mine,yours") == "kvgraft,mine,yours"
    assert allowed_plugins("") == "kvgraft"
    assert {"kvgraft", "lora_filesystem_resolver"} <= set(allowed_plugins(None).split(","))


@pytest.mark.parametrize(
    ("arguments", "quota"),
    [
        ([], 1.0),
        (["--api-key", "a"], 1.0),
        (["--api-key", "a", "b", "c", "d"], 0.25),
        (["--api-key", "a", "b", "--kvgraft-pin-quota", "0.75"], 0.75),
        (["--kvgraft-pin-quota", "0.75"], 0.75),
    ],
)
def test_tenants_have_equal_shares_of_what_may_be_pinned_unless_said_otherwise(
    arguments: list[str], quota: float
):
    assert ServerState(parse(arguments)).pins.quota == quota


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a known model that is here, named `tiny`."""
    make_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(KNOWN, "tiny", known_model(tmp_path / "tiny.gguf"))
    return get_model(tmp_path / "tiny.gguf").directory


@pytest.mark.parametrize("given", [["tiny"], ["--model", "tiny"]])
def test_a_model_is_served_under_its_name(tiny: Path, given: list[str]):
    args = parse(given)
    assert (args.model, args.served_model_name) == (str(tiny), ["tiny"])
    assert (args.dtype, args.kv_cache_memory_bytes, args.chat_template) == (
        "float32",
        KNOWN_KV_BYTES,
        None,
    )
    own = parse(
        [
            *given,
            "--served-model-name",
            "other",
            "--dtype",
            "bfloat16",
            "--kv-cache-memory-bytes",
            "123",
        ]
    )
    assert (own.served_model_name, own.dtype, own.kv_cache_memory_bytes) == (
        ["other"],
        "bfloat16",
        123,
    )


def test_what_a_user_has_converted_is_served_as_vllm_would(tiny: Path, tmp_path: Path):
    mine = get_model(tmp_path / "tiny.gguf", "mine").directory
    args = parse(["mine", "--no-kvgraft"])
    assert (args.model, args.served_model_name) == (str(mine), ["mine"])
    assert (args.dtype, args.kv_cache_memory_bytes) == ("auto", None)


def test_a_name_that_nobody_knows_lists_those_that_are_here(tiny: Path):
    with pytest.raises(
        FileNotFoundError, match=r"unheard is not a model directory.*: here are tiny; "
    ):
        parse(["unheard"])


def write_profile(path: Path, model: str) -> Path:
    measured = MeasuredPolicy("naive", 0.1, (0.05, 0.04, 0.06), (0.1, 0.0, 0.2))
    PolicyProfile(model, "naive", measured, (0.1, 0.1, 0.1), "texts", 2, 512, (measured,)).save(
        path
    )
    return path


def test_a_profile_is_taken_from_a_flag_or_from_beside_the_weights(tmp_path: Path):
    identity = load_config(MODEL_DIR).identity
    given = write_profile(tmp_path / "p.json", identity)
    settings = parse(["--kvgraft-profile", str(given)]).kv_transfer_config.kv_connector_extra_config
    assert settings == {"profile": str(given)}
    default = KVGraftSettings.parse(settings).default
    assert (str(default.policy), default.profile) == ("naive", PolicyProfile.load(given).name)
    assert RequestOptions.parse({}, default).profile == default.profile
    assert RequestOptions.parse({"policy": "epic"}, default).profile is None, (
        "the request has named its policy"
    )
    model = link_model(tmp_path / "model")
    beside = write_profile(model / POLICY_FILE, identity)
    assert parse([str(model)]).kv_transfer_config.kv_connector_extra_config == {
        "profile": str(beside)
    }
    named = parse(
        [str(model), "--kvgraft-policy", "epic"]
    ).kv_transfer_config.kv_connector_extra_config
    assert named == {"policy": "epic"}


def test_a_profile_of_another_checkpoint_is_refused_or_ignored(tmp_path: Path):
    other = write_profile(tmp_path / "p.json", "0" * 64)
    with pytest.raises(
        ValueError, match="the policy profile was made for model 000000000000, this one is"
    ):
        parse(["--kvgraft-profile", str(other)])
    with pytest.raises(FileNotFoundError, match="no such file: nowhere"):
        parse(["--kvgraft-profile", "nowhere"])
    with pytest.raises(ValueError, match="give either a policy or a profile, got naive and"):
        KVGraftSettings.parse({"policy": "naive", "profile": str(other)})
    model = link_model(tmp_path / "model")
    write_profile(model / POLICY_FILE, "0" * 64)
    assert parse([str(model)]).kv_transfer_config.kv_connector_extra_config == {}
