"""Analysis of a trace: reused tokens by side, pool, session and turn. A side is a reuse method,
such as prefix caching.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from kvgraft.cli.progress import OnProgress
from kvgraft.core.costs import TOKENS, Costs
from kvgraft_lab.traffic.chunks import CHUNK_TOKENS, FixedChunks
from kvgraft_lab.traffic.origins import Stretches, TokenCounts
from kvgraft_lab.traffic.replay import Replay, ReplaySettings, pages_for
from kvgraft_lab.traffic.seconds import Seconds, price
from kvgraft_lab.traffic.trace import RequestTrace, TracedRequest

PREFIX_CACHING, CHUNKS, KVGRAFT = "prefix caching", f"chunks of {CHUNK_TOKENS}", "kvgraft"
SIDES = (PREFIX_CACHING, CHUNKS, KVGRAFT)
# turns with their own row
SINGLE_TURNS = 8
# results of a prompt under each of SIDES
Answers = tuple[Stretches, ...]


@dataclass(frozen=True)
class GroupCounts:
    """Tokens of a group of requests by side, and seconds if costs are known."""

    name: str
    sides: dict[str, TokenCounts]
    seconds: Seconds | None


@dataclass(frozen=True)
class PoolCounts:
    """Tokens of all requests by side, with a pool of `tokens` tokens; None has no limit.

    Attributes:
        seconds: estimated seconds, if costs are known.
        given_up: requests without grafts because their sources and own pages did not fit into the
            pool together.
    """

    tokens: int | None
    sides: dict[str, TokenCounts]
    seconds: Seconds | None
    given_up: int


@dataclass(frozen=True)
class Analysis:
    """Shares of a trace's tokens; `turns` and `sessions` are those of the largest pool.

    Attributes:
        order: order of the requests.
        bad_lines: skipped lines.
        left_out: files in directories with another suffix.
        unknown_tokens: prompt tokens for words that the tokenizer does not know.
        costs: costs for estimated seconds; None without seconds.
        pools: pools from the smallest to the largest.
    """

    files: int
    requests: int
    tokens: int
    order: str
    tokenizer: str
    block_size: int
    max_depth: int
    match: str
    bad_lines: tuple[str, ...]
    left_out: tuple[str, ...]
    unknown_tokens: int
    costs: Costs | None
    pools: tuple[PoolCounts, ...]
    turns: tuple[GroupCounts, ...]
    sessions: tuple[GroupCounts, ...]

    @property
    def largest(self) -> PoolCounts:
        """Largest pool, which has the details."""
        return self.pools[-1]


@dataclass(frozen=True, eq=False)
class Analysed:
    """An analysis, and the origins of each prompt's tokens under the largest pool."""

    analysis: Analysis
    requests: tuple[TracedRequest, ...]
    answers: tuple[Answers, ...]


def analyse(
    trace: RequestTrace,
    settings: ReplaySettings,
    pools: Sequence[int | None] = (None,),
    *,
    per_session: bool = False,
    tokenizer: str = "",
    on_progress: OnProgress | None = None,
) -> Analysed:
    """Replay a trace under every side and pool.

    Args:
        pools: tokens of the KV pool; None has no limit.
        per_session: give every session its own cache and pool.
        tokenizer: name of the tokenizer, for the report.

    Raises:
        ValueError: a pool is smaller than a request.
    """
    pools = sorted(set(pools), key=lambda tokens: (tokens is None, tokens))
    _check_pools(pools, trace, settings.block_size)
    costs = None if settings.costs == TOKENS else settings.costs  # TOKENS is not in seconds
    groups = list(trace.by_session().values()) if per_session else [list(trace.requests)]
    steps, total = count(1), len(pools) * len(trace.requests)
    on_step = (lambda: None) if on_progress is None else (lambda: on_progress(next(steps), total))
    found: list[PoolCounts] = []
    answers: dict[TracedRequest, Answers] = {}
    for pool in pools:
        answers, given_up = _replay(groups, settings, pool, on_step)
        found.append(PoolCounts(pool, *_sums(answers.values(), costs), given_up))

    analysis = Analysis(
        files=trace.num_files,
        requests=len(trace.requests),
        tokens=trace.num_tokens,
        order=_order(trace, per_session),
        tokenizer=tokenizer,
        block_size=settings.block_size,
        max_depth=settings.max_depth,
        match="exact" if settings.similarity is None else "similar",
        bad_lines=trace.bad_lines,
        left_out=tuple(map(str, trace.left_out)),
        unknown_tokens=trace.num_unknown,
        costs=costs,
        pools=tuple(found),
        turns=_by_turn(trace.requests, answers, costs),
        sessions=tuple(
            GroupCounts(name, *_sums((answers[request] for request in requests), costs))
            for name, requests in trace.by_session().items()
        ),
    )
    return Analysed(analysis, trace.requests, tuple(answers[request] for request in trace.requests))


def _replay(
    groups: Iterable[Sequence[TracedRequest]],
    settings: ReplaySettings,
    pool: int | None,
    on_step: Callable[[], None],
) -> tuple[dict[TracedRequest, Answers], int]:
    """Return the result of each request, and the number of requests that gave up grafts. Each group
    has its own pool.
    """
    answers: dict[TracedRequest, Answers] = {}
    num_given_up = 0

    for group in groups:
        enough = sum(_pages(request, settings.block_size) for request in group)
        num_pages = enough if pool is None else min(enough, pool // settings.block_size)
        plain, grafting = (Replay(settings, num_pages, grafts=grafts) for grafts in (False, True))
        chunks = FixedChunks(pool)
        for request in group:
            prefix = plain.ask(request.tokens, request.answer)
            in_chunks = chunks.ask(request.tokens, request.segments, prefix)
            grafted = grafting.ask(request.tokens, request.answer)
            answers[request] = (
                Stretches.of(prefix),
                Stretches.of(in_chunks),
                Stretches.of(grafted),
            )
            on_step()
        num_given_up += grafting.num_given_up

    return answers, num_given_up


def _pages(request: TracedRequest, block_size: int) -> int:
    return pages_for(len(request.tokens) + len(request.answer), block_size)


def _check_pools(pools: Sequence[int | None], trace: RequestTrace, block_size: int) -> None:
    largest = max(_pages(request, block_size) for request in trace.requests) * block_size
    for tokens in pools:
        if tokens is not None and tokens < largest:
            raise ValueError(
                f"a pool of {tokens} tokens: the longest request of this trace needs {largest}"
            )


def _sums(
    answers: Iterable[Answers], costs: Costs | None
) -> tuple[dict[str, TokenCounts], Seconds | None]:
    """Return the tokens of some requests by side, and their seconds if there are costs."""
    prompts = list(answers)
    by_side = zip(*prompts, strict=True)
    counts = {side: TokenCounts.of(found) for side, found in zip(SIDES, by_side, strict=True)}
    return counts, None if costs is None else price(prompts, SIDES, costs)


def _by_turn(
    requests: Sequence[TracedRequest], answers: dict[TracedRequest, Answers], costs: Costs | None
) -> tuple[GroupCounts, ...]:
    """Return the counts of the first turns, then of ranges that double."""
    last = max(request.turn for request in requests)
    doubled = (SINGLE_TURNS << power for power in count())
    ranges = [range(turn, turn + 1) for turn in range(1, min(SINGLE_TURNS, last) + 1)]
    ranges += [
        range(after + 1, min(2 * after, last) + 1)
        for after in takewhile(lambda after: after < last, doubled)
    ]
    return tuple(
        GroupCounts(
            _range_name(turns),
            *_sums((answers[request] for request in requests if request.turn in turns), costs),
        )
        for turns in ranges
    )


def _range_name(turns: range) -> str:
    return str(turns[0]) if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"


def _order(trace: RequestTrace, per_session: bool) -> str:
    if per_session:
        return "each session on its own"
    return "by time" if trace.by_time else "sessions take turns"
