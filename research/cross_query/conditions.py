"""What the experiment compares, by name: conditions and ablations of cross-query segment reuse.

Under every condition an engine of its own answers all episodes of one seed in turn, and keeps what
it has read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraft.core.segmentation import Similarity, parse_match
from kvgraft.engine.engine import Engine
from kvgraft.policies import Similar, parse_policy
from kvgraft.store import StoreOptions

ANY_DEPTH = 1000
# of the scaffold, in the words of the bundled model
ANCHORS = ("thought :", "observation :", "doc")
CONTEXT = 0.5  # least similarity of left contexts: the paper wants a threshold, and names none
_PUBLISHED = {"tau": 0.8, "context_tau": CONTEXT, "context_tokens": 64}


@dataclass(frozen=True)
class Condition:
    """One way to answer all prompts.

    Attributes:
        policy, match: as the engine takes them.
        remembers: whether anything is kept for later prompts.
        counts_text: count what of a prompt stands in earlier ones, token by token, and reuse
            nothing.
        store: whether grafts come from a segment store: the pool is emptied before every step. The
            store takes exact blocks only, so every prompt is read in full when it has been
            answered, which nobody times.
        int8: whether that store keeps int8, and not the dtype of the model.
        max_depth: of sources: whether what was computed after a graft is one, too. At 0 agents have
            next to none: their prompts differ from the first token on, so all but what the first
            one held stands behind grafts.
    """

    name: str
    policy: str = "full"
    match: str = "exact"
    remembers: bool = True
    counts_text: bool = False
    store: bool = False
    int8: bool = False
    max_depth: int = ANY_DEPTH

    @property
    def similarity(self) -> Similarity | None:
        """What counts as a near-duplicate."""
        return parse_match(self.match)

    @property
    def similar(self) -> Similar | None:
        """Its policy, if that is the paper's."""
        policy = parse_policy(self.policy)
        return policy if isinstance(policy, Similar) else None

    def open(self, model: Path, **settings: Any) -> Engine:
        """An engine that has read nothing; settings are those that all conditions share (dtype,
        num_pages, ...)."""
        return Engine(
            model, policy=self.policy, match=self.match, max_depth=self.max_depth, anchors=ANCHORS,
            continuation=False,
            store=StoreOptions(int8=self.int8) if self.store else None, **settings,
        )  # fmt: skip


def _similar(
    name: str = "similar", changed: Mapping[str, float | str] | None = None, **store: bool
) -> Condition:
    """Ours-base as published but for options of the policy, or of the matching, that are
    changed."""
    changed = changed or {}
    policy = {option: value for option, value in changed.items() if hasattr(Similar, option)}
    match = {
        **_PUBLISHED,
        **{option: value for option, value in changed.items() if option not in policy},
    }
    return Condition(name, _named("similar", policy), _named("similar", match), **store)


def _named(name: str, options: Mapping[str, object]) -> str:
    return ":".join(
        (name, *filter(None, [",".join(f"{option}={value}" for option, value in options.items())]))
    )


NONE = "none"  # what all others are compared with
MAIN = (
    Condition(NONE, remembers=False),
    Condition("prefix"),
    Condition("text", remembers=False, counts_text=True),
    _similar(),
    Condition("transitive", "transitive", "similar"),
    Condition("sparsex", "sparsex", "similar"),
    Condition("sparsex:shallow=fresh", "sparsex:shallow=fresh", "similar"),
)
PROBE_OFF = "similar:probe_tokens=0"
SWEPT: Mapping[str, tuple[float, ...]] = {
    "reused_share": (0.25, 0.375, 0.5, 0.75),
    "halo_tokens": (0, 4, 8, 16),
    "tau": (0.3, 0.6, 0.7, 0.8, 0.9),
    "context_tokens": (32, 64, 128),
}
"""The values of the ablations, that of `similar` among them: L_reuse (8, 12, 16, 24 of 32 layers),
h, tau, W."""


def name_of(option: str, value: float) -> str:
    """The condition in which one option of `similar` has this value."""
    base = {**_PUBLISHED, "reused_share": Similar.reused_share, "halo_tokens": Similar.halo_tokens}
    return "similar" if value == base[option] else f"similar:{option}={value}"


def _ablations() -> Iterator[Condition]:
    for option, values in SWEPT.items():
        for value in values:
            if (name := name_of(option, value)) != "similar":
                yield _similar(name, {option: value})
    yield _similar(PROBE_OFF, {"probe_tokens": 0})
    yield _similar("similar:probe_tokens=8", {"probe_tokens": 8})
    yield _similar("similar:probe_at=reused", {"probe_at": "reused"})
    yield _similar("similar:context_tau=0.0", {"context_tau": 0.0})
    yield _similar("similar:store", store=True)
    yield _similar("similar:int8", store=True, int8=True)


ABLATIONS = tuple(_ablations())
CONDITIONS = {condition.name: condition for condition in (*MAIN, *ABLATIONS)}
GROUPS = {"main": MAIN, "ablations": ABLATIONS, "all": tuple(CONDITIONS.values())}


def find_conditions(text: str) -> tuple[Condition, ...]:
    """Conditions and groups of them by their names, separated by commas; each once.

    Raises:
        ValueError: no names, or an unknown one.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in CONDITIONS and name not in GROUPS]:
        raise ValueError(
            f"unknown condition {unknown[0]!r}: choose from {', '.join((*GROUPS, *CONDITIONS))}"
        )
    if not names:
        raise ValueError(
            f"conditions must name at least one of {', '.join((*GROUPS, *CONDITIONS))}"
        )
    groups = {**{name: (condition,) for name, condition in CONDITIONS.items()}, **GROUPS}
    return tuple(dict.fromkeys(condition for name in names for condition in groups[name]))
