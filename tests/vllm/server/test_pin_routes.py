"""The pins API of a running server."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import ADMIN, ALICE, BOB, RunningServer
from test_server import BLOCK, complete, elsewhere

from kvgraft.server.pin_routes import MAX_MESSAGES, MAX_TEXT, PATH
from kvgraft.server.tenancy import Tenant

LABELS = {key: Tenant.of(key).label for key in (ALICE, BOB)}


@pytest.fixture
def admin(server: RunningServer) -> Iterator[httpx.Client]:
    """A client with the admin key; what it pinned for Alice and Bob is deleted afterwards."""
    with server.http(ADMIN) as client:
        yield client
        for label in LABELS.values():
            for namespace in ("", "wide"):
                for segment in listed(client, label, namespace):
                    where = {"tenant": label, "namespace": namespace}
                    client.delete(f"{PATH}/{segment['name']}", params=where).raise_for_status()


def listed(client: httpx.Client, label: str, namespace: str = "") -> list[dict[str, Any]]:
    answer = client.get(PATH, params={"tenant": label, "namespace": namespace})
    answer.raise_for_status()
    return answer.json()["pins"]


def pin(client: httpx.Client, key: str, name: str, **source: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"name": name, "tenant": LABELS[key], **source})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.keys() == {"tenant", "namespace", "pin", "num_pins"}, (
        "what it costs to say does not grow"
    )
    assert (body["tenant"], body["pin"]["name"]) == (LABELS[key], name)
    return body["pin"]


def test_a_pinned_text_is_a_hit_for_its_tenant_only(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    document = texts.document()
    segment = pin(admin, ALICE, "manual", text=document)
    assert segment["num_blocks"] == segment["num_tokens"] // BLOCK > 10
    assert (segment["num_shed"], segment["hits"]) == (0, 0)
    assert complete(server, BOB, elsewhere(document))[0] == 0
    assert complete(server, ALICE, elsewhere(document))[0] >= segment["num_tokens"] - BLOCK
    [after] = listed(admin, LABELS[ALICE])
    assert after["hits"] == 1
    assert listed(admin, LABELS[BOB]) == []


def test_a_text_is_tokenised_as_a_prompt(server: RunningServer, admin: httpx.Client, texts: Any):
    text = texts.document()
    segment = pin(admin, ALICE, "text", text=text)
    cached, report = complete(server, ALICE, text)
    assert cached == report["prefix_tokens"] >= segment["num_tokens"] - BLOCK


def test_messages_are_tokenised_as_the_beginning_of_a_chat(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    """The template puts a token before each message, and a generation prompt that would fill the
    last block."""
    content = " ".join(texts.document().split()[: 10 * BLOCK - 3])
    messages: list[Any] = [{"role": "system", "content": content}]
    segment = pin(admin, ALICE, "chat", messages=messages)
    assert segment["num_blocks"] == 9
    chat = [*messages, {"role": "user", "content": "question : code of lamp ? answer :"}]
    answer = server.openai(ALICE).chat.completions.create(
        model="bundled", messages=chat, max_tokens=1
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == segment["num_tokens"]


def test_a_namespace_has_segments_of_its_own(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    document = texts.document()
    pin(admin, ALICE, "manual", text=document, namespace="wide")
    assert listed(admin, LABELS[ALICE]) == []
    assert [segment["name"] for segment in listed(admin, LABELS[ALICE], "wide")] == ["manual"]
    assert complete(server, ALICE, elsewhere(document))[0] == 0
    inside = {"kv_transfer_params": {"kvgraft": {"namespace": "wide"}}}
    assert complete(server, ALICE, elsewhere(document), **inside)[0] > 0


def test_a_list_that_names_no_tenant_has_the_segments_of_all(admin: httpx.Client, texts: Any):
    for key in (ALICE, BOB):
        admin.post(
            PATH, json={"tenant": LABELS[key], "name": "one each", "text": texts.document()}
        ).raise_for_status()
    found = {
        (one["tenant"], one["name"]) for one in admin.get(PATH).raise_for_status().json()["pins"]
    }
    assert found >= {(LABELS[ALICE], "one each"), (LABELS[BOB], "one each")}
    for key in (ALICE, BOB):
        admin.delete(f"{PATH}/one each", params={"tenant": LABELS[key]}).raise_for_status()


def test_a_name_stands_for_the_text_that_was_pinned_last_until_it_is_deleted(
    admin: httpx.Client, texts: Any
):
    where = {"tenant": LABELS[ALICE]}
    pin(admin, ALICE, "a/b c", text=texts.document(100))
    longer = pin(admin, ALICE, "a/b c", text=texts.document(300))
    assert listed(admin, LABELS[ALICE]) == [longer]
    assert longer["num_tokens"] >= 256
    deleted = admin.delete(f"{PATH}/a/b%20c", params=where).json()
    assert (deleted["pin"], deleted["num_pins"]) == (longer, 0)
    assert listed(admin, LABELS[ALICE]) == []
    again = admin.delete(f"{PATH}/a/b%20c", params=where)
    assert again.status_code == 404
    assert "a/b c" in again.json()["error"]["message"]


def test_more_than_a_tenant_may_pin_is_a_409_and_changes_nothing(admin: httpx.Client, texts: Any):
    """Half of the capacity, as this server's flags say."""
    pin(admin, ALICE, "0", text=texts.document(4000))
    for namespace in ("", "wide"):
        wanted = {
            "name": "1",
            "tenant": LABELS[ALICE],
            "text": texts.document(4000),
            "namespace": namespace,
        }
        refused = admin.post(PATH, json=wanted)
        assert refused.status_code == 409
        assert "of at most 159, a share of 0.5" in refused.json()["error"]["message"]
    assert [segment["name"] for segment in listed(admin, LABELS[ALICE])] == ["0"]
    assert listed(admin, LABELS[ALICE], "wide") == []
    pin(admin, BOB, "0", text=texts.document(4000))


def test_the_status_shows_each_tenant_its_segments(
    server: RunningServer, admin: httpx.Client, texts: Any
):
    pin(admin, ALICE, "hers", text=texts.document(100))
    pin(admin, BOB, "his", text=texts.document(100), namespace="wide")
    shown = {
        key: [(s["name"], s["namespace"]) for s in server.status(key)["pins"]]
        for key in (ALICE, BOB, ADMIN)
    }
    assert shown[ALICE] == [("hers", "")]
    assert shown[BOB] == [("his", "wide")]
    assert sorted(shown[ADMIN]) == [("hers", ""), ("his", "wide")]


def test_tenants_are_listed_by_label_and_one_must_be_named(admin: httpx.Client):
    tenants = admin.get("/v1/kvgraft/tenants").json()["tenants"]
    assert [tenant["tenant"] for tenant in tenants] == [*LABELS.values(), "shared"]
    listed = admin.get(PATH, params={"namespace": "wide"})
    for answer in (listed, admin.post(PATH, json={"name": "x", "text": "the"})):
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("name a tenant: ")
    assert admin.get(PATH, params={"tenant": "nobody"}).status_code == 400


@pytest.mark.parametrize("key", [ALICE, None])
def test_only_the_admin_may(server: RunningServer, key: str | None):
    expected = 403 if key else 401
    with server.http(key) as client:
        assert client.get(PATH, params={"tenant": LABELS[ALICE]}).status_code == expected
        assert client.post(PATH, json={"name": "x", "text": "the"}).status_code == expected
        assert client.delete(f"{PATH}/x").status_code == expected


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"name": "x"},
        {"name": "x", "text": "the", "messages": [{"role": "user", "content": "the"}]},
        {"name": "", "text": "the"},
        {"name": "n" * 129, "text": "the"},
        {"name": "line\nline", "text": "the"},
        {"name": "x", "text": ""},
        {"name": "x", "text": "a" * (MAX_TEXT + 1)},
        {"name": "x", "messages": []},
        {"name": "x", "messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)},
        {"name": "x", "messages": [{"role": "user", "content": "a", "image": "b"}]},
        {"name": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"name": "x", "text": "the", "namespace": "\n"},
        {"name": "x", "text": "the", "pinned": True},
        {"name": "x", "text": "the " * 5000},
        {"name": "x", "text": "the code"},
    ],
)
def test_what_cannot_be_pinned_is_a_400(admin: httpx.Client, wanted: dict[str, Any]):
    answer = admin.post(PATH, json={"tenant": LABELS[ALICE], **wanted})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert listed(admin, LABELS[ALICE]) == []
