"""The server's settings: every refusal names the setting and what is allowed."""

import re
from typing import Any

import pytest

from kvgraft.core.pins import PinnedDocuments
from kvgraft.kv.pages import PagePool
from kvgraft.vllm.settings import KVGraftSettings


def test_nothing_given_is_the_default():
    assert KVGraftSettings.parse({}) == KVGraftSettings()


def test_what_is_given_is_taken():
    said = {
        "policy": "sparsex:boundary_layers=2,recompute_share=0.3",
        "continuation": False,
        "max_depth": 2,
        "require_clean_context": True,
        "watermark": 1,
        "pin_capacity": 0.25,
        "costs": "tokens",
        "exactness_weight": 0,
        "document_gib": 0.5,
        "idle_refresh": 0.1,
    }
    assert KVGraftSettings.parse(said) == KVGraftSettings(**said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"polcy": "naive"},
            "KVGraft has no option 'polcy': it has policy, profile, head_map, match, "
            "residual_layers, continuation",
        ),
        ({"policy": "best"}, "unknown policy 'best': choose from auto, cacheblend, condense"),
        (
            {"policy": "sparsex:recompute_share=2"},
            "recompute_share must be a share from 0 to 1, got 2",
        ),
        ({"policy": "sparsex:k=2"}, "policy 'sparsex' has no option 'k'"),
        ({"profile": 3}, "profile must be a path, got 3"),
        ({"policy": 3}, "policy must be a name or name:option=value,..., got 3"),
        ({"watermark": 1.5}, "watermark must be a share"),
        ({"watermark": "0.9"}, "watermark must be a share"),
        ({"watermark": True}, "watermark must be a share"),
        ({"pin_capacity": -0.1}, "pin_capacity must be a share"),
        ({"pin_capacity": float("nan")}, "pin_capacity must be a share"),
        ({"exactness_weight": 2}, "exactness_weight must be a share from 0 to 1, got 2"),
        ({"idle_refresh": 2}, "idle_refresh must be a share from 0 to 1, got 2"),
        ({"costs": 1.0}, "costs must be measured, tokens or a file, got 1.0"),
        ({"document_gib": -1}, "document_gib must be a number of at least 0, got -1"),
        ({"document_gib": float("nan")}, "document_gib must be a number of at least 0, got nan"),
        ({"document_gib": "much"}, "document_gib must be a number of at least 0, got 'much'"),
        ({"document_gib": True}, "document_gib must be a number of at least 0, got True"),
        ({"store_shared": "nowhere"}, "shared tier 'nowhere': no URL: give redis://HOST:6379/0"),
        ({"store_shared_timeout": 0}, "store_shared_timeout must be a number above 0, got 0"),
        (
            {"store_shared_timeout": "soon"},
            "store_shared_timeout must be a number above 0, got 'soon'",
        ),
        ({"store_shared_gib": 4}, "shared_gib 4 is the size of shared_url: give that, too"),
        ({"continuation": 1}, "continuation must be true or false, got 1"),
        ({"max_depth": "yes"}, "max_depth must be an integer of at least 0, got 'yes'"),
        ({"require_clean_context": 1}, "require_clean_context must be true or false, got 1"),
        ({"allow_untested": "yes"}, "allow_untested must be true or false, got 'yes'"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(said: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        KVGraftSettings.parse(said)


@pytest.mark.parametrize("name", ["watermark", "pin_capacity"])
def test_shares_of_the_pool_are_those_that_the_pinned_pool_takes(name: str):
    for share in (1e-9, 0.5, 1):
        settings = KVGraftSettings.parse({name: share})
        PinnedDocuments(PagePool(8, 4), settings.watermark, settings.pin_capacity)
    with pytest.raises(ValueError, match=name):
        KVGraftSettings.parse({name: 0})
