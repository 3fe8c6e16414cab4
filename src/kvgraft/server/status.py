"""Status page at `/kvgraft`, and the JSON figures that it shows."""

import base64
import hashlib
import re
import time
from collections import Counter
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from vllm.v1.metrics.prometheus import get_prometheus_registry

from kvgraft.server.call import CURRENT

STARTED = time.monotonic()
PAGE = files("kvgraft.server").joinpath("page.html").read_text(encoding="utf-8")

# shown to one of several tenants, because the figures cover all of them
NO_FIGURES: dict[str, Any] = {
    "running": None,
    "waiting": None,
    "pool": None,
    "index_entries": None,
    "idle_refresh_tokens": None,
    "fallbacks": {},
}

router = APIRouter()


def _source_hashes(tag: str) -> str:
    """Return the hashes of the page's inline sources with this tag, for a content security
    policy."""
    inline = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in inline
    )


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_source_hashes('script')}; "
        f"style-src {_source_hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/kvgraft")
async def page() -> HTMLResponse:
    """Return the self-contained page, which holds no data itself."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


@router.get("/v1/kvgraft/status")
async def status(request: Request) -> dict[str, Any]:
    """Return the pool, pinned documents, recent requests and sums that the caller may see."""
    call, state = CURRENT.get(), request.app.state.kvgraft
    if call is None:
        raise RuntimeError("the status was asked for past our middleware")

    principal = call.principal
    return {
        "model": request.app.state.openai_serving_models.model_name(),
        "policy": state.settings.default_policy,
        "profile": state.default.profile,
        "match": state.settings.default_match,
        "uptime_s": time.monotonic() - STARTED,
        "engine_silent_s": state.engine_silent_s,
        "view": {"tenant": principal.tenant.name, "is_admin": principal.is_admin},
        "pins": await state.pins.view(principal),
        "guard": state.guard_view(principal),
        **state.request_log.view(principal),
        **(engine_figures() if principal.is_admin or state.keyring.has_one_tenant else NO_FIGURES),
    }


def engine_figures() -> dict[str, Any]:
    """Return the connector's Prometheus figures, summed over all engines and tenants.

    `pool` is None before the engine's first step.
    """
    pool = _by_label("kvgraft:pool_blocks", "state")
    return {
        "running": int(_by_label("vllm:num_requests_running", None)[""]),
        "waiting": int(_by_label("vllm:num_requests_waiting", None)[""]),
        "pool": {state: int(pool[state]) for state in ("used", "free", "pinned")} if pool else None,
        "index_entries": int(_by_label("kvgraft:index_entries", None)[""]),
        "idle_refresh_tokens": int(_by_label("kvgraft:idle_refresh_tokens_total", None)[""]),
        "fallbacks": {
            reason: int(n)
            for reason, n in _by_label("kvgraft:fallbacks_total", "reason").items()
            if n
        },
    }


def _by_label(name: str, label: str | None) -> Counter[str]:
    """Return the samples of one metric by the values of a label, summed over all other labels.

    Args:
        label: None sums over all labels, under the key "".
    """
    sums: Counter[str] = Counter()
    for metric in get_prometheus_registry().restricted_registry([name]).collect():
        for sample in metric.samples:
            sums[sample.labels[label] if label else ""] += sample.value
    return sums
