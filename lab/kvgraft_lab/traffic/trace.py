"""Recorded requests as token ids, in the order in which a server gets them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvgraft.cli.progress import OnProgress
from kvgraft_lab.traffic.files import TraceFile, find_files, read_file
from kvgraft_lab.traffic.records import BadLine, LoggedAnswer, LoggedRequest
from kvgraft_lab.traffic.tokens import TokenReader, pieces_of

NOTHING = np.empty(0, np.int32)


@dataclass(eq=False)
class TracedRequest:
    """One request.

    Attributes:
        tokens: tokens of the prompt, int32 [T].
        segments: beginnings of its messages, int64 [s], where known; 0 is the first.
        answer: tokens of the answer, int32 [a]; empty if the trace lacks them.
        num_answered: number of answer tokens, if the trace has only their number.
        turn: number of the request in its session, from 1.
    """

    session: str
    timestamp: float | None
    tokens: np.ndarray
    segments: np.ndarray
    answer: np.ndarray = field(default_factory=NOTHING.copy)
    turn: int = 0
    num_answered: int = 0


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Requests in the order of their replay.

    Attributes:
        by_time: True if the order is that of timestamps; otherwise sessions take turns.
        bad_lines: reasons of skipped lines.
        left_out: files in directories with another suffix.
        num_unknown: prompt tokens for words that the tokenizer does not know.
    """

    requests: tuple[TracedRequest, ...]
    num_files: int
    by_time: bool
    bad_lines: tuple[str, ...]
    left_out: tuple[Path, ...]
    num_unknown: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(request.tokens) for request in self.requests)

    def by_session(self) -> dict[str, list[TracedRequest]]:
        """Return the requests of each session in order; sessions are in the order of their first
        requests.
        """
        sessions: dict[str, list[TracedRequest]] = {}
        for request in self.requests:
            sessions.setdefault(request.session, []).append(request)
        return sessions


def read_trace(
    paths: Sequence[Path],
    reader: TokenReader,
    *,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> RequestTrace:
    """Read files, and directories of files.

    Raises:
        FileNotFoundError: a path does not exist, or a directory has no file to read.
        ValueError: a line cannot be read (unless bad lines are skipped), or there is no request.
    """
    files, left_out = find_files(paths)
    requests: list[TracedRequest] = []
    bad_lines: list[str] = []

    for number, file in enumerate(files):
        for place, said in _requests(file, reader):
            if isinstance(said, TracedRequest):
                requests.append(said)
            elif skip_bad_lines:
                bad_lines.append(f"{place}: {said}")
            else:
                raise ValueError(f"{place}: {said} (--skip-bad-lines goes on without such lines)")
        if on_progress is not None:
            on_progress(number + 1, len(files))

    if not requests:
        skipped = (
            f", {len(bad_lines)} bad lines, the first of them: {bad_lines[0]}" if bad_lines else ""
        )
        raise ValueError(f"no request in {', '.join(map(str, paths))}{skipped}")

    by_time = all(request.timestamp is not None for request in requests)
    ordered = sorted(requests, key=_time) if by_time else list(_taking_turns(requests))
    turns: Counter[str] = Counter()
    for request in ordered:
        turns[request.session] += 1
        request.turn = turns[request.session]

    unknown = sum(int((request.tokens == reader.unknown_id).sum()) for request in ordered)
    return RequestTrace(
        tuple(ordered), len(files), by_time, tuple(bad_lines), tuple(left_out), unknown
    )


def _requests(
    file: TraceFile, reader: TokenReader
) -> Iterator[tuple[str, TracedRequest | BadLine]]:
    """Yield the requests of a file. An answer is added to its request, even one that has been
    yielded.
    """
    by_id: dict[str, TracedRequest] = {}
    last: TracedRequest | None = None

    for session, (place, said) in read_file(file):
        if isinstance(said, LoggedRequest):
            try:
                last = _tokenised(said, session, reader)
            except BadLine as error:
                yield place, error
                continue
            by_id[said.request_id or ""] = last
            yield place, last
        elif isinstance(said, LoggedAnswer):
            request = by_id.get(said.request_id) if said.request_id else last
            if request is not None:
                request.answer = reader.encode(said.text)
        else:
            yield place, said


def _tokenised(request: LoggedRequest, session: str, reader: TokenReader) -> TracedRequest:
    pieces = pieces_of(request.prompt, reader)
    starts = np.cumsum([0, *map(len, pieces[:-1])])
    return TracedRequest(
        request.session or session,
        request.timestamp,
        np.concatenate(pieces),
        starts,
        num_answered=request.num_answered,
    )


def _time(request: TracedRequest) -> float:
    return request.timestamp or 0.0


def _taking_turns(requests: Sequence[TracedRequest]) -> Iterator[TracedRequest]:
    """Yield the first request of every session, then the second ones, and so on."""
    sessions: dict[str, list[TracedRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    for turn in range(max(map(len, sessions.values()))):
        yield from (of_session[turn] for of_session in sessions.values() if turn < len(of_session))
