"""Comparison of policies with full recomputation on one prompt (`kvgraft compare`)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import Part, Segment, parse_markers
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Report, Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.policies import parse_policy
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate.scoring import (
    ANSWER_TOKENS,
    ORDER_NOISE,
    native_distances,
    other_orders,
    send,
)


class Case(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Input file. Reuse markers in the texts cut out segments. Without markers, shared text is
    still found.

    Attributes:
        prompt: prompt to answer under every policy.
        read: texts that the model reads first, each in its own request.
        policies: names or `name:option=value,...`; `full` always comes first, as the reference.
        max_tokens: length of the answers.
        repeats: timed runs of each policy, in turn; the median counts.
    """

    prompt: str
    read: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("naive", "sparsex", DEFAULT_POLICY)
    max_tokens: int = 16
    repeats: int = 3


class PolicyOutcome(msgspec.Struct, frozen=True):
    """Outcome of one policy, or order noise: full on the first other order of the segments, with
    mean distances over all orders.

    Attributes:
        first_kl: KL(full || policy) of the first token, in nats.
        answer_kl: mean KL along full's own answer, in nats.
        flips, loglik: see `guard.distances.along`.
        agreement: share of full's answer tokens that this answer has at the same place.
        kl_per_noise: `answer_kl` divided by that of order noise, if requested.
    """

    policy: str
    ttft_s: float
    speedup: float
    first_kl: float
    first_token_equal: bool
    answer_kl: float
    flips: float
    loglik: float
    agreement: float
    text: str
    report: Report
    kl_per_noise: float | None = None


def load_case(path: Path) -> Case:
    """Read and check an input file.

    Raises:
        FileNotFoundError, ValueError: no such file, not of this form, or an unknown policy.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        case = msgspec.json.decode(path.read_bytes(), type=Case)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    for policy in case.policies:
        parse_policy(policy)
    if case.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {case.repeats}")
    return case


def run_compare(
    engine: Engine, case: Case, on_progress: OnProgress | None = None, *, order_noise: bool = False
) -> list[PolicyOutcome]:
    """Read the texts, then answer the prompt under every policy in turn, `repeats` times. Answers
    are not reused.

    Args:
        order_noise: also answer the prompt in full with its segments in other orders.

    Raises:
        ValueError: the engine cannot answer, or there is no other order.
    """
    names = ["full", *(name for name in case.policies if name != "full")]
    parts = parse_markers(case.prompt)
    asked = {name: _request(parts, name, case.max_tokens) for name in names}
    others = (
        [_request(order, "full", case.max_tokens) for order in _orders(parts)]
        if order_noise
        else []
    )
    reading = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.generate([Request(parse_markers(text), "full", reading) for text in case.read])
    runs = range(case.repeats + 1)  # the first run is a warm-up
    last: dict[str, Result] = {}
    times: dict[str, list[float]] = {name: [] for name in names}

    for number in runs:
        for place, name in enumerate(names):
            last[name] = send(engine, asked[name])
            times[name] += [last[name].report.ttft_s] if number else []
            if on_progress is not None:
                on_progress(number * len(names) + place + 1, len(runs) * len(names))

    truth = last["full"]
    outcomes = [
        _outcome(engine, name, asked[name], last[name], truth, times[name], times["full"])
        for name in names
    ]
    if not others:
        return outcomes

    noise = _mean([_noise(engine, other, truth) for other in others])
    unit = noise.answer_kl
    return [
        msgspec.structs.replace(outcome, kl_per_noise=outcome.answer_kl / unit if unit else None)
        for outcome in (*outcomes, noise)
    ]


def render(outcomes: list[PolicyOutcome]) -> RenderableType:
    """Return tables of the policies, at most 80 columns wide, followed by their texts, for a rich
    console.
    """
    unit = ("/ noise",) if outcomes[-1].policy == ORDER_NOISE else ()
    quality = _table("TTFT ms", "faster", "KL", *unit, "flips", "same")
    quality.caption = (
        f"KL: full against policy, nats, mean over the first {ANSWER_TOKENS} tokens of full's own "
        "answer; flips: of "
        "these, where the best token is another; same: tokens of full's answer found at the same "
        "place"
        + (
            f"; {ORDER_NOISE}: full with the segments in other orders, / noise: KL divided by that"
            if unit
            else ""
        )
    )
    tokens = _table("prefix", "grafted", "redone", "fresh")
    tokens.caption = "tokens of the prompt; redone: grafted tokens recomputed in the last layer"
    texts = Table(box=None, pad_edge=False, show_header=False)
    texts.add_column(overflow="fold", max_width=30)
    texts.add_column(overflow="fold")

    for o in outcomes:
        report = o.report
        noise = ["-" if o.kl_per_noise is None else f"{o.kl_per_noise:.2f}"] if unit else []
        far = (f"{o.answer_kl:.4f}", *noise, f"{o.flips:.0%}", f"{o.agreement:.0%}")
        quality.add_row(Text(o.policy), f"{1e3 * o.ttft_s:.1f}", f"{o.speedup:.2f}", *far)
        counts = (
            report.prefix_tokens,
            report.grafted_tokens,
            report.recomputed_tokens,
            report.fresh_tokens,
        )
        tokens.add_row(Text(o.policy), *map(str, counts))
        texts.add_row(Text(o.policy), Text(o.text))

    return Group(quality, tokens, texts)


def _table(*numbers: str) -> Table:
    """Return an empty table with a column for the policy and columns for numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left"
    )
    table.add_column("policy", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _request(parts: Sequence[Part], policy: str, max_tokens: int) -> Request:
    return Request(
        parts, policy, SamplingParams(max_tokens=max_tokens), remember=False, return_logits=True
    )


def _orders(parts: Sequence[Part]) -> list[tuple[Part, ...]]:
    """Return the parts with their segments in other orders. Raise ValueError if there is no other
    order.
    """
    segments = [place for place, part in enumerate(parts) if isinstance(part, Segment)]
    if not (orders := other_orders(parts, segments, "compare")):
        raise ValueError(
            "order noise needs a prompt with two different segments between reuse markers"
        )
    return orders


def _noise(engine: Engine, request: Request, truth: Result) -> PolicyOutcome:
    """Return the outcome of full with the segments in another order."""
    ours = send(engine, request)
    return _outcome(
        engine, ORDER_NOISE, request, ours, truth, [ours.report.ttft_s], [truth.report.ttft_s]
    )


def _outcome(
    engine: Engine,
    name: str,
    request: Request,
    ours: Result,
    truth: Result,
    times: list[float],
    fulls: list[float],
) -> PolicyOutcome:
    equal = [a == b for a, b in zip(ours.token_ids, truth.token_ids, strict=False)]
    length = max(len(ours.token_ids), len(truth.token_ids))
    far = native_distances(engine, request, ours, truth)
    return PolicyOutcome(
        policy=name,
        ttft_s=median(times),
        speedup=median([full / seconds for full, seconds in zip(fulls, times, strict=True)]),
        first_kl=far["kl"],
        first_token_equal=equal[0],
        answer_kl=far["answer_kl"],
        flips=far["flips"],
        loglik=far["loglik"],
        agreement=sum(equal) / length,
        text=ours.text,
        report=ours.report,
    )


def _mean(outcomes: Sequence[PolicyOutcome]) -> PolicyOutcome:
    """Return the first outcome, with the mean distances of all."""
    names = ("first_kl", "answer_kl", "flips", "loglik", "agreement")
    means = {name: mean(getattr(outcome, name) for outcome in outcomes) for name in names}
    return msgspec.structs.replace(outcomes[0], **means)
