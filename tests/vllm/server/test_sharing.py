"""Shared namespaces of a server: who may read them, and who may not learn of them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import ADMIN, ALICE, BOB, RunningServer
from test_server import QUESTION, ROUTES, complete, elsewhere, make_read, report_of, reused

from kvgraft.server.arguments import parse
from kvgraft.server.keys import ADMIN_KEY, API_KEY, Keys
from kvgraft.server.pin_routes import PATH
from kvgraft.server.server_state import ServerState
from kvgraft.server.sharing import SHARED, Grants, NotGranted
from kvgraft.server.tenancy import LOCAL, Keyring, Salts, Tenant
from kvgraft.vllm.namespace_grants import GRANTED

LABELS = {key: Tenant.of(key).label for key in (ALICE, BOB)}
KEYRING = Keyring(Keys((ALICE, BOB), ADMIN))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADMIN_KEY, API_KEY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def admin(server: RunningServer) -> Iterator[httpx.Client]:
    """A client with the admin key; what it has shared is deleted afterwards."""
    with server.http(ADMIN) as client:
        yield client
        for namespace in ("wiki", "law"):
            where = {"tenant": "shared", "namespace": namespace}
            for segment in client.get(PATH, params=where).raise_for_status().json()["pins"]:
                client.delete(f"{PATH}/{segment['name']}", params=where).raise_for_status()


def share(admin: httpx.Client, texts: Any, namespace: str) -> str:
    """A new document in a shared namespace."""
    document = texts.document()
    wanted = {"name": "manual", "tenant": "shared", "namespace": namespace, "text": document}
    answer = admin.post(PATH, json=wanted).raise_for_status().json()
    assert (answer["tenant"], answer["namespace"], answer["num_pins"]) == ("shared", namespace, 1)
    return document


def naming(*shared: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvgraft": {"shared": list(shared)}}}


def test_a_key_grafts_what_is_granted_to_it(server: RunningServer, admin: httpx.Client, texts: Any):
    wiki, law = share(admin, texts, "wiki"), share(admin, texts, "law")
    for document, key, granted in (
        (wiki, BOB, False),
        (wiki, ALICE, True),
        (law, BOB, True),
        (law, ALICE, True),
    ):
        cached, report = complete(server, key, elsewhere(document))
        assert (cached >= 500) == (report["grafted_tokens"] >= 500) == granted
        assert granted or (cached, report["grafted_tokens"], report["reason"]) == (
            0,
            0,
            "no_known_text",
        )


def test_shared_text_is_copied_also_where_it_begins_the_prompt(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    document = share(admin, texts, "wiki")
    _, report = complete(server, ALICE, document)
    assert (report["prefix_tokens"], report["grafted_tokens"] >= 500) == (0, True)
    _, again = complete(server, BOB, document)
    assert (again["prefix_tokens"], again["grafted_tokens"]) == (0, 0)


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_on_every_route_shared_text_is_for_who_may_read_it(
    server: RunningServer, admin: httpx.Client, texts: Any, path: str
):
    document = share(admin, texts, "wiki")
    assert make_read(server, path, BOB, document) == 0
    assert make_read(server, path, ALICE, document) > 0


def test_every_answer_of_a_request_finds_shared_text(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    prompts = [elsewhere(share(admin, texts, namespace)) for namespace in ("wiki", "law")]
    ask: dict[str, Any] = {"model": "bundled", "prompt": prompts, "max_tokens": 1, "temperature": 1}
    for key, count, least, most in ((BOB, 1, 500, 700), (ALICE, 2, 1000, 1400)):
        before = reused(server, key)
        server.openai(key).completions.create(
            **ask, n=count, extra_body={"kv_transfer_params": {"kvgraft": {}}}
        )
        assert least <= reused(server, key) - before <= most


def test_a_request_may_do_without_what_is_granted(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    document = share(admin, texts, "wiki")
    for shared, found in (
        (("law",), False),
        ((), False),
        (("wiki",), True),
        (("law", "wiki"), True),
    ):
        inside = {
            "kv_transfer_params": {
                "kvgraft": {"shared": list(shared), "namespace": "-".join(shared)}
            }
        }
        assert (complete(server, ALICE, elsewhere(document), **inside)[0] >= 500) == found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("unread", [False, True])
def test_what_is_not_granted_is_the_same_404_as_what_does_not_exist(
    server: RunningServer, admin: httpx.Client, texts: Any, stream: bool, unread: bool
):
    """`unread`: a body that the middleware leaves to vLLM, as NaN is no JSON, is refused by the
    gate to the engine."""
    share(admin, texts, "wiki")
    told = []
    for name in ("wiki", "none"):
        body = {"model": "bundled", "prompt": QUESTION, "stream": stream, **naming("law", name)}
        body |= {"comment": float("nan")} if unread else {}
        with server.http(BOB) as client:
            headers = {"Content-Type": "application/json"}
            answer = client.post("/v1/completions", content=json.dumps(body), headers=headers)
        assert answer.status_code == 404, answer.text
        told.append(answer.json()["error"]["message"].replace(f"'{name}'", "NAME"))
    assert told[0] == told[1] == "shared: no namespace NAME for this key: it has law"


def test_no_other_name_leads_there(server: RunningServer, admin: httpx.Client, texts: Any):
    document = share(admin, texts, "wiki")
    for name in ("wiki", "shared", "shared/wiki"):
        inside = {"kv_transfer_params": {"kvgraft": {"namespace": name}}}
        assert complete(server, BOB, elsewhere(document), **inside)[0] == 0
        assert complete(server, BOB, elsewhere(document), cache_salt=name.replace("/", ":"))[0] == 0
    with server.http(BOB) as client:
        params = {"kvgraft": {}, GRANTED: {"salts": ["wiki"], "proof": ""}}
        answer = client.post(
            "/v1/completions", json={"prompt": QUESTION, "kv_transfer_params": params}
        )
    assert (answer.status_code, GRANTED in answer.json()["error"]["message"]) == (400, True)


def test_what_a_reader_leaves_is_its_own(server: RunningServer, admin: httpx.Client, texts: Any):
    share(admin, texts, "law")
    mine = texts.document()
    complete(server, ALICE, mine)
    assert complete(server, BOB, elsewhere(mine))[0] == 0
    assert complete(server, ALICE, elsewhere(mine))[0] >= 500


def test_only_the_admin_sees_what_is_shared_and_how_often_it_is_read(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    document = share(admin, texts, "wiki")
    report_of(
        server.openai(ALICE).completions.create(
            model="bundled", prompt=elsewhere(document), max_tokens=1
        )
    )
    [segment] = admin.get(PATH, params={"tenant": "shared", "namespace": "wiki"}).json()["pins"]
    assert segment["hits"] == 1
    assert server.status(ALICE)["pins"] == server.status(BOB)["pins"] == []
    [shown] = server.status(ADMIN)["pins"]
    assert (shown["tenant"], shown["namespace"], shown["name"]) == ("shared", "wiki", "manual")
    with server.http(ALICE) as client:
        assert (
            client.delete(
                f"{PATH}/manual", params={"tenant": "shared", "namespace": "wiki"}
            ).status_code
            == 403
        )


def test_the_admin_fills_what_is_shared_and_nothing_else(admin: httpx.Client):
    assert admin.get("/v1/kvgraft/tenants").json()["tenants"][2:] == [
        {"tenant": "shared", "namespaces": ["wiki", "law"]}
    ]
    for namespace in ("", "none"):
        wanted = {"name": "x", "tenant": "shared", "namespace": namespace, "text": "the"}
        refused = admin.post(PATH, json=wanted)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "namespace")
        assert (
            f"no shared namespace '{namespace}': there are wiki, law"
            in refused.json()["error"]["message"]
        )


def test_grants_are_by_key_by_label_or_for_all():
    grants = Grants([f"wiki={LABELS[ALICE]}", f"law={BOB},{ALICE}", "news=*"], KEYRING)
    alice, bob = KEYRING.tenants
    assert grants.names_for(alice) == grants.names == ("wiki", "law", "news")
    assert grants.names_for(bob) == ("law", "news")
    assert grants.names_for(alice, ("news", "wiki")) == ("news", "wiki")
    assert grants.names_for(alice, ()) == grants.names_for(SHARED) == grants.names_for(LOCAL) == ()
    for tenant, wanted in ((bob, "wiki"), (bob, ""), (alice, "Wiki"), (LOCAL, "news")):
        with pytest.raises(NotGranted, match=f"no namespace '{wanted}' for this key"):
            grants.names_for(tenant, (wanted,))


def test_the_only_tenant_of_a_server_without_keys_may_read_too():
    assert Grants(["wiki=*"], Keyring(Keys((), ADMIN))).names_for(LOCAL) == ("wiki",)
    assert Grants(["wiki=local"], Keyring(Keys((), ADMIN))).names_for(LOCAL) == ("wiki",)


def test_the_cache_key_of_shared_text_is_no_tenants_and_says_what_it_is():
    salts = Salts()
    tenants = [LOCAL, *(Tenant.of(key) for key in (ALICE, BOB, "shared", ""))]
    assert salts.of(SHARED, "wiki") not in {salts.of(tenant, "wiki") for tenant in tenants}
    assert salts.of(SHARED, "wiki").endswith(":shared/wiki")
    assert len(SHARED.identity) not in {len(tenant.identity) for tenant in tenants}


ALLOWED = rf"allowed are \*, the keys, or {LABELS[ALICE]}, {LABELS[BOB]}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["wiki=nobody"], rf"--kvgraft-share wiki: no API key 'nobody': {ALLOWED}"),
        ([f"wiki={ALICE},"], rf"--kvgraft-share wiki: no API key '': {ALLOWED}"),
        ([f"wiki={ADMIN}"], rf"--kvgraft-share wiki: no API key 'key-of-the-a\.\.\.': {ALLOWED}"),
        ([f"wiki=*,{BOB}"], rf"--kvgraft-share wiki: no API key '\*': {ALLOWED}"),
        (
            [f"wiki={BOB},{LABELS[BOB]}"],
            f"--kvgraft-share wiki: the API key {LABELS[BOB]} is given twice",
        ),
        (
            ["wiki"],
            r"--kvgraft-share 'wiki': say whom it is shared with, as NAME=KEY,KEY or NAME=\*",
        ),
        (["wiki="], "--kvgraft-share 'wiki': say whom it is shared with"),
        (
            ["=*"],
            "--kvgraft-share: a name must be a printable string of 1 to 128 characters, got ''",
        ),
        (["a\nb=*"], "--kvgraft-share: a name must be a printable string"),
        (
            ["wiki=*", f"wiki={BOB}"],
            "--kvgraft-share 'wiki' is given twice: name all of its keys in one",
        ),
    ],
)
def test_a_grant_that_cannot_be_is_refused_by_name(given: list[str], message: str):
    flags = [f for value in given for f in ("--kvgraft-share", value)]
    with pytest.raises(ValueError, match=message):
        parse(["--api-key", ALICE, BOB, "--kvgraft-admin-key", ADMIN, *flags])


def test_without_an_admin_key_nobody_could_fill_it():
    with pytest.raises(
        ValueError, match="--kvgraft-share wiki: only an admin key can fill it, and there is none"
    ):
        parse(["--api-key", ALICE, "--kvgraft-share", "wiki=*"])
    with pytest.raises(ValueError, match="--no-kvgraft does not go with --kvgraft-share"):
        parse(["--no-kvgraft", "--kvgraft-share", "wiki=*"])


def test_arguments_keep_no_key_and_one_more_owner_pins():
    keys = ["--api-key", ALICE, BOB, "--kvgraft-admin-key", ADMIN]
    flags = ["--kvgraft-share", f"wiki={BOB}", "--kvgraft-share=law=*"]
    args = parse([*keys, *flags, "--kvgraft-tenant", f"bob={BOB}"])
    assert args.kvgraft_tenant == [f"bob={LABELS[BOB]}"]
    assert args.kvgraft_share == [f"wiki={LABELS[BOB]}", f"law={LABELS[ALICE]},{LABELS[BOB]}"]
    state = ServerState(args)
    assert [tenant.name for tenant in state.keyring.tenants] == [LABELS[ALICE], "bob"]
    assert state.grants.names_for(Tenant.of(BOB)) == ("wiki", "law")
    assert state.pins.quota == 1 / 3
    assert ServerState(parse(keys)).pins.quota == 1 / 2
