import base64
from pathlib import Path

import pytest
from running import ADMIN, ALICE, BOB

from kvgraft.server.keys import Keys, check_exposure
from kvgraft.server.pins import shown
from kvgraft.server.request_log import Entry, RequestLog
from kvgraft.server.sharing import Grants
from kvgraft.server.tenancy import LOCAL, Keyring, Principal, Salts, Tenant, shown_key
from kvgraft.store import secret
from kvgraft.vllm.options import namespace_label

KEYRING = Keyring(Keys((ALICE, BOB), ADMIN))


def test_each_key_is_a_tenant_and_the_admin_key_is_none_of_them():
    assert KEYRING.principal(ALICE) == Principal(Tenant.of(ALICE))
    assert KEYRING.principal(BOB) == Principal(Tenant.of(BOB))
    admin = KEYRING.principal(ADMIN)
    assert admin is not None
    assert admin.is_admin
    assert admin.tenant not in KEYRING.tenants
    assert [tenant.label for tenant in KEYRING.tenants] == [
        Tenant.of(key).label for key in (ALICE, BOB)
    ]


@pytest.mark.parametrize(
    "key", [None, "", "x", ALICE + " ", ALICE[:-1], ALICE.upper(), Tenant.of(ALICE).label]
)
def test_a_key_that_is_none_gives_nobody(key: str | None):
    assert KEYRING.principal(key) is None


def test_without_api_keys_all_are_one_tenant_and_only_the_admin_key_makes_an_admin():
    keyring = Keyring(Keys((), ADMIN))
    assert keyring.principal(None) == keyring.principal("EMPTY") == Principal(LOCAL)
    assert keyring.principal(ADMIN) == Principal(LOCAL, is_admin=True)
    assert Keyring(Keys()).principal("") == Principal(LOCAL)


def test_a_tenant_is_named_by_its_label_or_is_the_only_one():
    alice = Tenant.of(ALICE)
    assert KEYRING.tenant(alice.label) == alice
    assert Keyring(Keys((ALICE,))).tenant(None) == alice
    with pytest.raises(ValueError, match=f"name a tenant: {alice.label}, "):
        KEYRING.tenant(None)
    with pytest.raises(ValueError, match="no tenant 'nobody'"):
        KEYRING.tenant("nobody")


def named(*entries: str) -> Keyring:
    return Keyring(Keys((ALICE, BOB), ADMIN, entries))


@pytest.mark.parametrize("key", [ALICE, Tenant.of(ALICE).label])
def test_a_tenant_has_the_name_that_the_operator_gives(key: str):
    keyring = named(f"search team={key}")
    alice, bob = keyring.tenants
    assert (alice.name, bob.name) == ("search team", bob.label)
    assert keyring.tenant("search team") is keyring.tenant(alice.label) is alice
    assert keyring.principal(ALICE) == Principal(alice) == Principal(Tenant.of(ALICE))
    with pytest.raises(ValueError, match=f"name a tenant: search team, {bob.label}"):
        keyring.tenant(None)
    # a name changes no cache key
    salts = Salts()
    assert salts.of(alice) == salts.of(Tenant.of(ALICE))
    assert keyring.names_as_arguments == [f"search team={alice.label}"]
    assert shown(alice, "n", "")["tenant"] == "search team"
    log = RequestLog(keyring.tenants)
    log.add(Entry.of(alice, "/", None))
    assert log.view(Principal(alice))["recent"][0]["tenant"] == "search team"
    assert Grants(["wiki=search team"], keyring).names_for(alice) == ("wiki",)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([ALICE], "give NAME=KEY, and no key as the name"),
        ([f"{ALICE}=alice"], "give NAME=KEY, and no key as the name"),
        ([f"{ADMIN}={ALICE}"], "give NAME=KEY, and no key as the name"),
        ([f"={ALICE}"], "a name must be a printable string of 1 to 128 characters, got ''"),
        (["alice=unheard"], "alice: no such API key: give a key, or one of "),
        ([f"alice={ADMIN}"], "alice: no such API key: give a key, or one of "),
        ([f"a={ALICE}", f"b={ALICE}"], f"b: the tenant {Tenant.of(ALICE).label} already has"),
        ([f"a={ALICE}", f"a={BOB}"], "a: this is already the name or label of a tenant"),
        ([f"shared={ALICE}"], "shared: this is already the name or label of a tenant"),
        ([f"{Tenant.of(BOB).label}={ALICE}"], "this is already the name or label of a tenant"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_no_key_is_shown(
    entries: list[str], message: str
):
    with pytest.raises(ValueError, match="--kvgraft-tenant") as refused:
        named(*entries)
    assert message in str(refused.value)
    assert not any(key in str(refused.value) for key in (ALICE, BOB, ADMIN, "unheard"))


def test_the_cache_key_depends_on_every_part_and_on_nothing_else():
    salts, alice, bob = Salts(), Tenant.of(ALICE), Tenant.of(BOB)
    parts = [
        (alice,),
        (bob,),
        (alice, "n"),
        (alice, "", "n"),
        (alice, "n", "n"),
        (alice, "nn"),
        (alice, "", "nn"),
    ]
    keys = [salts.of(*part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert keys == [salts.of(*part) for part in parts]
    assert salts.of(alice, "", None) == salts.of(alice)
    assert Salts().of(alice) != salts.of(alice)
    assert salts.nobody() not in {*keys, salts.nobody()}


def test_the_cache_key_says_whose_it_is_and_gives_nothing_away():
    salts, alice = Salts(), Tenant.of(ALICE)
    keys = [
        salts.of(alice),
        salts.of(alice, "wiki"),
        salts.of(alice, "wiki", "hers"),
        salts.of(alice, "", "hers"),
    ]
    label = alice.label
    assert [namespace_label(key) for key in keys] == [
        label,
        f"{label}/wiki",
        f"{label}/wiki+salt",
        f"{label}+salt",
    ]
    assert len({key[:64] for key in keys}) == len(keys), (
        "what is secret does not depend on the label"
    )
    assert not any(ALICE in key or "hers" in key for key in keys)


def test_servers_on_one_directory_have_the_same_cache_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also when one starts while the other one is just writing the secret."""
    folder, alice, keys = tmp_path / "store", Tenant.of(ALICE), []

    def write_slowly(path: Path, data: bytes) -> None:
        monkeypatch.undo()
        path.touch(0o600)
        keys.append(Salts(folder).of(alice))
        path.write_bytes(data)

    monkeypatch.setattr(secret, "write_file", write_slowly)
    keys += [Salts(folder).of(alice), Salts(folder).of(alice)]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert Salts(tmp_path / "another").of(alice) not in keys
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(PermissionError, match="has 5 bytes, not 32"):
        Salts(folder)


def test_servers_with_one_secret_in_their_environment_have_the_same_cache_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alice = Tenant.of(ALICE)
    own = Salts(tmp_path / "store").of(alice)
    monkeypatch.setenv(secret.CACHE_SECRET, "5e" * 32)
    key = Salts().of(alice)
    assert key == Salts(tmp_path / "store").of(alice) != own
    assert Salts().of(Tenant.of(BOB)) != key
    monkeypatch.setenv(secret.CACHE_SECRET, "5f" * 32)
    assert Salts().of(alice) != key
    monkeypatch.setenv(secret.CACHE_SECRET, "short")
    with pytest.raises(ValueError, match="must be 64 hexadecimal digits") as refused:
        Salts()
    assert "short" not in str(refused.value)


def test_keys_for_different_purposes_differ():
    keys = {
        secret.derive(b"s" * 32, purpose) for purpose in ("cache keys", "data", "records", "names")
    }
    assert len(keys) == 4
    assert b"s" * 32 not in keys
    assert {len(key) for key in keys} == {32}


def test_parts_of_the_cache_key_do_not_run_into_one_another():
    salts = Salts()
    assert salts.of(Tenant("a", b"ab"), "c") != salts.of(Tenant("a", b"a"), "bc")
    assert salts.of(LOCAL, "ab", "c") != salts.of(LOCAL, "a", "bc")


@pytest.mark.parametrize(
    ("header", "on_page", "elsewhere"),
    [
        (None, None, None),
        ("Bearer k", "k", "k"),
        ("bearer k", "k", "k"),
        ("Bearer ", None, None),
        ("k", None, None),
        ("Basic " + base64.b64encode(b"anyone:k:k").decode(), "k:k", None),
        ("Basic " + base64.b64encode(b"anyone").decode(), None, None),
        ("Basic ***", None, None),
        ("Basic " + base64.b64encode(b"\xff\xfe").decode(), None, None),
    ],
)
def test_a_browser_may_show_a_key_as_a_password_on_the_page_only(
    header: str | None, on_page: str | None, elsewhere: str | None
):
    assert shown_key(header, basic=True) == on_page
    assert shown_key(header, basic=False) == elsewhere


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"api_keys": ("a", "a")}, "given twice"),
        ({"api_keys": ("a", "")}, "must not be empty"),
        ({"api_keys": ("a",), "admin_key": "a"}, "must differ"),
        ({"admin_key": ""}, "must not be empty"),
    ],
)
def test_keys_that_contradict_one_another_are_refused(keys: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Keys(**keys)


def test_keys_do_not_show_themselves():
    assert ALICE not in repr(Keys((ALICE,), ADMIN))
    assert ADMIN not in repr(Keys((ALICE,), ADMIN))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_keys_a_server_may_listen_on_loopback(host: str):
    check_exposure((), host=host, uds=None, single_tenant=False)


@pytest.mark.parametrize(
    "host", [None, "", "::", "10.0.0.1", "example.org", "localhost.example.org"]
)
def test_without_keys_a_server_must_not_listen_elsewhere_unasked(host: str | None):
    with pytest.raises(ValueError, match="loopback only"):
        check_exposure((), host=host, uds=None, single_tenant=False)
    check_exposure((), host=host, uds=None, single_tenant=True)
    check_exposure((), host=host, uds="/run/socket", single_tenant=False)
    check_exposure((ALICE,), host=host, uds=None, single_tenant=False)


def test_one_tenant_with_keys_is_a_contradiction():
    with pytest.raises(ValueError, match="for a server without API keys"):
        check_exposure((ALICE,), host="127.0.0.1", uds=None, single_tenant=True)
