"""What users can say and see is documented: a new option, flag or metric has its row; files that
pages name exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvgraft.core.options import AttentionFields
from kvgraft.core.report import REASONS
from kvgraft.engine.options import EngineOptions
from kvgraft.fleet.options import FleetAddress, FleetOptions
from kvgraft.fleet.options import flag_of as fleet_flag_of
from kvgraft.policies import POLICIES
from kvgraft.server.flags import flag_of
from kvgraft.setting_schema import declarations
from kvgraft.store import StoreOptions
from kvgraft.store.shared import SharedTier
from kvgraft.store.store import SegmentStore
from kvgraft.vllm.request_fields import RequestFields
from kvgraft.vllm.setting_fields import STORE, SettingFields
from kvgraft.vllm.stats import METRICS

ROOT = Path(__file__).parent.parent
EXAMPLES = {"src/kvgraft/policies/glance.py", "my_flows.py"}  # that a reader would write


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_is_documented_with_its_options(policy: type):
    text = page("policies.md")
    assert f"`{policy.name}`" in text
    rows = "\n".join(line for line in text.splitlines() if line.startswith(f"| `{policy.name}` |"))
    missing = [field.name for field in fields(policy) if f"`{field.name}`" not in rows]
    assert not missing


@pytest.mark.parametrize("name", declarations(SettingFields))
def test_every_setting_has_the_row_that_it_declares(name: str):
    declared, flag = declarations(SettingFields)[name], flag_of(name)
    names = [flag]
    if name in STORE:
        names.append(STORE[name])
    if declared.default is True:
        names.append(flag.replace("--", "--no-", 1))
    row = declared.row(", ".join(f"`{one}`" for one in names))
    assert row in page("serving.md").splitlines() + page("store.md").splitlines()


def test_the_options_of_a_store_are_settings_of_a_server():
    assert set(STORE.values()) == declarations(StoreOptions).keys()


@pytest.mark.parametrize("name", declarations(RequestFields))
def test_every_option_of_a_request_has_the_row_that_it_declares(name: str):
    shown = f"`{name}`{', and options of policies' if name == 'policy' else ''}"
    assert declarations(RequestFields)[name].row(shown) in page("serving.md").splitlines()


@pytest.mark.parametrize(
    ("name", "flags"),
    [("head_paging", "`--kvgraft-head-paging`"), ("flow", "`--flow`, `--kvgraft-flow`")],
)
def test_every_option_of_attention_has_the_row_that_it_declares(name: str, flags: str):
    assert declarations(AttentionFields)[name].row(flags) in page("serving.md").splitlines()


@pytest.mark.parametrize("name", declarations(EngineOptions))
def test_every_keyword_of_an_engine_has_the_row_that_it_declares(name: str):
    row = declarations(EngineOptions)[name].row(f"`{name}`")
    assert row in page("engine.md").splitlines()


FLEET = declarations(FleetOptions) | declarations(FleetAddress)


@pytest.mark.parametrize("name", FLEET)
def test_every_option_of_a_fleet_has_the_row_that_it_declares(name: str):
    assert FLEET[name].row(f"`{fleet_flag_of(name)}`") in page("fleet.md").splitlines()


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_documented(metric: str):
    rows = "\n".join(
        line for line in page("operations.md").splitlines() if line.startswith("| `kvgraft:")
    )
    assert f"`{metric}`" in rows


def test_every_event_of_the_store_is_documented():
    [row] = [
        line
        for line in page("operations.md").splitlines()
        if line.startswith("| `kvgraft:store_total`")
    ]
    said = f"{SegmentStore.__doc__}{SharedTier.counts.__doc__}"
    events = set(re.findall(r'"([a-z_]+)"', said)) - {"shared_"}
    assert "catalogue_failed" in events
    assert not {event for event in events if f"`{event}`" not in row}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_documented(reason: str):
    assert any(
        f"`{reason}`" in line
        for line in page("operations.md").splitlines()
        if line.startswith("| `")
    )


def test_the_readme_can_be_read_at_once():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda path: path.name)
def test_files_that_pages_name_exist(page: Path):
    rooms = ("src", "lab", "research", "benchmarks", "tests", "scripts", "docs")
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in (ROOT / room).rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py\b", page.read_text(encoding="utf-8"))) - EXAMPLES
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
