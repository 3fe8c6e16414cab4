import pytest
from vllm.outputs import RequestOutput

from kvgraft.server.request_log import RECENT, Entry, RequestLog
from kvgraft.server.tenancy import Principal, Tenant
from kvgraft.vllm.options import ServedReport

ALICE, BOB, ADMIN = (Tenant.of(name) for name in ("alice", "bob", "admin"))
GRAFTED = ServedReport(
    "sparsex",
    100,
    20,
    0,
    60,
    10,
    20,
    spans=[[0, 20, "prefix"], [20, 80, "grafted"], [80, 100, "fresh"]],
)


def ended(tenant: Tenant, report: ServedReport | None, num_cached: int = 0) -> Entry:
    if report:
        report.conclude(report.reason)
    params = report.as_params() if report else None
    output = RequestOutput(
        "r",
        None,
        [0] * 100,
        None,
        [],
        True,
        num_cached_tokens=num_cached,
        kv_transfer_params=params,
    )
    return Entry.of(tenant, "/v1/completions", output)


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (GRAFTED, "grafted"),
        (
            ServedReport(
                prompt_tokens=9, prefix_tokens=2, continued_tokens=6, fresh_tokens=1, depth=1
            ),
            "continued",
        ),
        (ServedReport(prompt_tokens=3, prefix_tokens=2, fresh_tokens=1), "prefix_only"),
        (ServedReport(prompt_tokens=3, fresh_tokens=3, reason="no_known_text"), "miss"),
    ],
)
def test_the_outcome_follows_from_the_report(report: ServedReport, outcome: str):
    entry = ended(ALICE, report)
    assert (entry.outcome, entry.reason, entry.spans) == (outcome, report.reason, report.spans)
    assert entry.tokens == {
        "prefix": report.prefix_tokens,
        "continued": report.continued_tokens,
        "grafted": report.grafted_tokens,
        "recomputed": report.recomputed_tokens,
        "fresh": report.fresh_tokens,
    }


@pytest.mark.parametrize(
    ("num_cached", "spans"),
    [(0, [[0, 100, "fresh"]]), (32, [[0, 32, "prefix"], [32, 100, "fresh"]])],
)
def test_without_a_report_vllms_own_counts_are_entered(
    num_cached: int, spans: list[list[int | str]]
):
    entry = ended(ALICE, None, num_cached)
    assert (entry.prompt_tokens, entry.tokens["prefix"], entry.tokens["fresh"]) == (
        100,
        num_cached,
        100 - num_cached,
    )
    assert entry.spans == spans


def test_what_was_aborted_has_no_tokens():
    entry = Entry.of(ALICE, "/v1/completions", None)
    assert (entry.outcome, entry.tokens, entry.ttft_s) == ("aborted", {}, None)


def test_a_tenant_sees_its_own_and_the_admin_all():
    request_log = RequestLog((ALICE, BOB))
    miss = ServedReport(prompt_tokens=7, fresh_tokens=7, reason="no_known_text")
    for tenant, report in ((ALICE, GRAFTED), (BOB, miss), (BOB, miss), (ADMIN, GRAFTED)):
        request_log.add(ended(tenant, report))
    alice, bob = (request_log.view(Principal(tenant)) for tenant in (ALICE, BOB))
    assert [entry["tenant"] for entry in alice["recent"]] == [ALICE.label]
    assert alice["totals"]["requests"] == {"grafted": 1}
    assert alice["totals"]["misses"] == {}
    assert bob["totals"] == {
        "requests": {"miss": 2},
        "tokens": {"prefix": 0, "continued": 0, "grafted": 0, "recomputed": 0, "fresh": 14},
        "misses": {"no_known_text": 2},
    }
    everything = request_log.view(Principal(ADMIN, is_admin=True))
    assert [entry["tenant"] for entry in everything["recent"]] == [
        ADMIN.label,
        BOB.label,
        BOB.label,
        ALICE.label,
    ]
    assert everything["totals"]["requests"] == {"grafted": 2, "miss": 2}
    assert everything["totals"]["tokens"] == {
        "prefix": 40,
        "continued": 0,
        "grafted": 120,
        "recomputed": 20,
        "fresh": 54,
    }


def test_a_prefix_hit_is_no_miss():
    request_log = RequestLog((ALICE,))
    request_log.add(
        ended(
            ALICE,
            ServedReport(prompt_tokens=40, prefix_tokens=36, fresh_tokens=4, reason="too_short"),
        )
    )
    totals = request_log.view(Principal(ALICE))["totals"]
    assert (totals["requests"], totals["misses"]) == ({"prefix_only": 1}, {})


def test_old_requests_are_forgotten_one_tenants_by_its_own_only_and_sums_stay():
    request_log = RequestLog((ALICE, BOB))
    request_log.add(ended(BOB, GRAFTED))
    for _ in range(RECENT + 5):
        request_log.add(ended(ALICE, GRAFTED))
    assert len(request_log.view(Principal(BOB))["recent"]) == 1
    alice = request_log.view(Principal(ALICE))
    assert len(alice["recent"]) == RECENT
    assert alice["totals"]["requests"] == {"grafted": RECENT + 5}
    assert len(request_log.view(Principal(ADMIN, is_admin=True))["recent"]) == RECENT
