"""The table of docs/models.md, of what the tests of families have found.

Run as a script it writes the table anew: python tests/vllm/family_table.py
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from kvgraft.engine.checkpoint import UnsupportedModel  # noqa: E402
from kvgraft.engine.config import load_config  # noqa: E402
from kvgraft.vllm.compat.families import BY_HEAD_ARCHITECTURES  # noqa: E402

PAGE = TESTS.parent / "docs" / "models.md"
BEGIN, END = (
    "<!-- families: written by tests/vllm/family_table.py -->\n",
    "<!-- end of families -->\n",
)
HEAD = (
    "| family | vLLM's class | attention | grafts | edited | documents | store | flows | head maps "
    "| native engine |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
LAYERS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "windows",
    "ChunkedLocalAttentionSpec": "chunks",
}


def is_grafted(facts: Mapping[str, Any]) -> bool:
    """Whether recomputing everything is exact, grafts read their source, and exact prefixes stay
    exact."""
    recomputed = all(facts[policy]["tokens"] == facts["plain"] for policy in ("sparsex", "spread"))
    return (
        recomputed
        and facts["copied"]
        and facts["naive"]["report"]["grafted_tokens"] > 480
        and not facts["wrong"]
    )


def row(family: str, variant: str, model: Path, facts: Mapping[str, Any]) -> str:
    """A line of the table."""
    similar = facts["near_duplicates"]
    kinds = {LAYERS.get(name, "latents"): None for name in facts["groups"]}
    cells = [
        is_grafted(facts),
        similar["report"]["grafted_tokens"] > 100 and similar["tokens"] == facts["plain_edited"],
        facts["documents"]["outcome"] == "grafted",
        facts["stored"],
        facts["flow"].get("dense") == facts["plain"] and facts["flow"]["is_followed"],
        facts["architecture"] in BY_HEAD_ARCHITECTURES,
        runs_natively(model),
    ]
    name = f"{family}, {variant}" if variant else family
    found = ("yes" if cell else "no" for cell in cells)
    return f"| {name} | `{facts['architecture']}` | {', '.join(kinds)} | {' | '.join(found)} |"


def runs_natively(model: Path) -> bool:
    """Whether the native engine takes the checkpoint."""
    try:
        return bool(load_config(model))
    except UnsupportedModel:
        return False


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def table(rows: Mapping[tuple[str, str], str]) -> str:
    """All lines."""
    return "\n".join([*HEAD, *rows.values(), ""])


def main() -> None:
    from tempfile import TemporaryDirectory

    from test_families import CASES, facts_of

    with TemporaryDirectory() as folder:
        rows = {
            case: row(*case, Path(folder) / case[0], facts_of(Path(folder), *case))
            for case in CASES
        }
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + BEGIN + table(rows) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
