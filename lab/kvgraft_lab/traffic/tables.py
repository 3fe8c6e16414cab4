"""Tables of an analysis for a terminal."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvgraft.core.cost_model import WORK
from kvgraft.core.matches import DEEP, MAX_DEPTH, depth_name
from kvgraft_lab.traffic.analysis import CHUNKS, KVGRAFT, PREFIX_CACHING, Analysis, GroupCounts
from kvgraft_lab.traffic.origins import TokenCounts
from kvgraft_lab.traffic.seconds import Seconds

MOST_SESSIONS = 12  # rows of the table
LONGEST_NAME = 20  # characters of a session's name
EVERYTHING = "everything computed"
HOW_TO_PRICE = (
    "seconds, too: kvgraft profile-costs MODEL -o costs.json, then analyze --costs costs.json"
)
PRICED = (
    f"seconds are estimated: requests one after another, and of what is grafted {WORK:.0%} is "
    "computed again, "
    "whoever grafts it"
)


def render(analysis: Analysis) -> Group:
    """Return a summary, all sides, seconds if there are any, grafts by depth, pools if several,
    turns and sessions.
    """
    parts: list[RenderableType] = [Text(headline(analysis), style="dim"), _sides(analysis)]
    grafted = analysis.largest.sides[KVGRAFT]
    if len(grafted.grafted) > 1:
        parts.append(Text(f"grafted by depth: {by_depth(grafted)}", style="dim"))

    parts += _seconds(analysis)
    if len(analysis.pools) > 1:
        parts.append(_pools(analysis))

    parts += [_groups("turn", analysis.turns, analysis)] if len(analysis.turns) > 1 else []
    if len(analysis.sessions) > 1:
        largest = _longest(analysis)
        parts.append(_groups("session", largest, analysis))
        if hidden := len(analysis.sessions) - len(largest):
            parts.append(
                Text(f"the longest sessions; --json has the other {hidden}, too", style="dim")
            )

    return Group(*parts, *(Text(note, style="yellow") for note in notes(analysis)))


def headline(analysis: Analysis) -> str:
    """Return the analysed files and settings in one line."""
    return (
        f"{analysis.requests:,} requests of {len(analysis.sessions):,} sessions in "
        f"{analysis.files:,} files, "
        f"{analysis.tokens:,} prompt tokens ({analysis.tokenizer}); {analysis.order}; pool of "
        f"{pool_name(analysis.largest.tokens)}, blocks of {analysis.block_size}, "
        f"{depth_limit(analysis.max_depth)}, "
        f"{analysis.match} matching"
    )


def notes(analysis: Analysis) -> list[str]:
    """Return the limits of the figures: what they omit or overstate."""
    found = []
    if analysis.bad_lines:
        found.append(
            f"lines skipped: {len(analysis.bad_lines)}; the first: {analysis.bad_lines[0]}"
        )
    if analysis.left_out:
        found.append(
            f"files of another kind, not read: {len(analysis.left_out)}; the first: "
            f"{analysis.left_out[0]}"
        )
    if analysis.unknown_tokens:
        found.append(
            f"{percent(analysis.unknown_tokens / analysis.tokens)} of the tokens are words that "
            "the tokenizer does not "
            "know, which all look the same: reuse is overstated, choose another --tokenizer"
        )

    for pool in analysis.pools:
        if pool.given_up:
            found.append(
                f"pool of {pool_name(pool.tokens)}: requests that grafted nothing, since sources "
                "and prompt did not "
                f"fit into it together: {pool.given_up}"
            )

    return found


def pool_name(tokens: int | None) -> str:
    """Return the size of a pool in words."""
    if tokens is None:
        return "unlimited size"
    return f"{tokens:,} tokens"


def depth_limit(max_depth: int) -> str:
    """Return the limit of depth in words."""
    return f"depth up to {max_depth}" if max_depth < MAX_DEPTH else "any depth"


def by_depth(counts: TokenCounts) -> str:
    """Return grafted tokens by depth, as shares of the prompts; depths from DEEP on are one."""
    sums = [*counts.grafted[:DEEP], sum(counts.grafted[DEEP:])]
    shares = {
        depth_name(depth): percent(counts.share(tokens))
        for depth, tokens in enumerate(sums)
        if tokens
    }
    return ", ".join(f"{name}: {share}" for name, share in shares.items())


def percent(share: float) -> str:
    """Return a share as in tables."""
    return f"{100 * share:.1f} %"


def _seconds_rows(seconds: Seconds) -> list[tuple[str, float, float]]:
    """Return (side, seconds, saved seconds), full computation first."""
    sides = ((side, taken, seconds.saved(side)) for side, taken in seconds.sides.items())
    return [(EVERYTHING, seconds.full, 0.0), *sides]


def _longest(analysis: Analysis) -> list[GroupCounts]:
    """Return the sessions with a row in the table."""
    return sorted(analysis.sessions, key=lambda group: -group.sides[KVGRAFT].prompt)[:MOST_SESSIONS]


def _seconds(analysis: Analysis) -> list[RenderableType]:
    """Return the seconds of all prompts and of the longest sessions, or a hint how to get them."""
    total = analysis.largest.seconds
    if total is None:
        return [Text(HOW_TO_PRICE, style="dim")]

    table = _table("seconds of prefill", "all prompts", "saved", "saved, %")
    for name, taken, saved in _seconds_rows(total):
        share = f"{100 * saved / total.full:.1f}" if total.full else ""
        cells = ("", "") if name == EVERYTHING else (_duration(saved), share)
        table.add_row(name, _duration(taken), *cells, style="bold" if name == KVGRAFT else "")

    if len(analysis.sessions) < 2:
        return [table, Text(PRICED, style="dim")]

    heads = [name.replace(" ", "\n", 1) for name in (EVERYTHING, *total.sides)]
    sessions = _table("seconds, by session", *heads, "saved by\nkvgraft")

    for group in _longest(analysis):
        if group.seconds is not None:
            taken_by = [_duration(taken) for _, taken, _ in _seconds_rows(group.seconds)]
            sessions.add_row(
                Text(_shortened(group.name)), *taken_by, _duration(group.seconds.saved(KVGRAFT))
            )

    return [table, sessions, Text(PRICED, style="dim")]


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f}" if abs(seconds) >= 10 else f"{seconds:.3g}"


def _sides(analysis: Analysis) -> Table:
    table = _table("% of prompt tokens", *_kinds(analysis))
    for side, counts in analysis.largest.sides.items():
        table.add_row(side, *_cells(analysis, counts), style="bold" if side == KVGRAFT else "")
    return table


def _pools(analysis: Analysis) -> Table:
    table = _table("pool, tokens", *_others(), *_kinds(analysis))
    for pool in analysis.pools:
        name = "unlimited" if pool.tokens is None else f"{pool.tokens:,}"
        table.add_row(name, *_new(pool.sides), *_cells(analysis, pool.sides[KVGRAFT]))
    return table


def _groups(name: str, groups: Iterable[GroupCounts], analysis: Analysis) -> Table:
    table = _table(name, "re-\nquests", "tokens", *_others(), *_kinds(analysis))
    for group in groups:
        counts = group.sides[KVGRAFT]
        sizes = (f"{counts.requests:,}", _compact(counts.prompt))
        table.add_row(
            Text(_shortened(group.name)), *sizes, *_new(group.sides), *_cells(analysis, counts)
        )
    return table


def _others() -> list[str]:
    """Return the columns of the sides with which KVGraft is compared."""
    return [f"{side.replace(' ', chr(10), 1)}:\nnew" for side in (PREFIX_CACHING, CHUNKS)]


def _new(sides: Mapping[str, TokenCounts]) -> list[str]:
    return [_number(sides[side], sides[side].new) for side in (PREFIX_CACHING, CHUNKS)]


def _kinds(analysis: Analysis) -> list[str]:
    similar = ["near-\ndupl."] if analysis.match == "similar" else []
    return ["prefix", "contin-\nued", "grafted", *similar, "new"]


def _cells(analysis: Analysis, counts: TokenCounts) -> list[str]:
    similar = [counts.similar] if analysis.match == "similar" else []
    kinds = (counts.prefix, counts.continued, sum(counts.grafted), *similar, counts.new)
    return [_number(counts, tokens) for tokens in kinds]


def _number(counts: TokenCounts, tokens: int) -> str:
    return f"{100 * counts.share(tokens):.1f}"


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _compact(tokens: int) -> str:
    """Return a number with about three digits."""
    for size, unit in ((10**6, "M"), (10**3, "K")):
        if tokens >= 10 * size:
            return f"{tokens / size:,.0f}{unit}"
        if tokens >= size:
            return f"{tokens / size:.2f}{unit}"
    return str(tokens)


def _table(first: str, *others: str) -> Table:
    first_column = Column(first, overflow="fold", vertical="bottom")
    table = Table(first_column, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in others:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    return table
