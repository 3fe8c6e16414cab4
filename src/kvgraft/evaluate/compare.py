"""One prompt under several policies, against full recomputation (`kvgraft compare`)."""

from pathlib import Path
from statistics import median

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Report, Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.evaluate.metrics import first_token
from kvgraft.evaluate.progress import OnProgress
from kvgraft.prefill.policies import parse_policy
from kvgraft.segments.prompt import Part, parse_markers


class Case(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The input file. Reuse markers in the texts cut out segments; without them any shared text is found all the same.

    Attributes:
        prompt: answered under every policy.
        read: texts that the model has read before, each in a request of its own.
        policies: names or `name:option=value,...`; `full` always comes first, as the truth.
        max_tokens: length of the answers.
        repeats: timed runs of each policy, in turn; the median counts.
    """

    prompt: str
    read: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("naive", "sparsex", "transitive")
    max_tokens: int = 16
    repeats: int = 3


class Outcome(msgspec.Struct, frozen=True):
    """One policy. `first_kl` is KL(full || policy) of the first token in nats; `agreement` is the share of the full
    answer's tokens that this answer has at the same place."""

    policy: str
    ttft_s: float
    speedup: float
    first_kl: float
    first_token_equal: bool
    agreement: float
    text: str
    report: Report


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


def run_compare(engine: Engine, case: Case, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Read, then answer under every policy in turn, `repeats` times; nothing that is answered is reused."""
    names = ["full", *(name for name in case.policies if name != "full")]
    reading = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.generate([Request(parse_markers(text), "full", reading) for text in case.read])
    prompt, runs = parse_markers(case.prompt), range(case.repeats + 1)  # one to warm up
    results: dict[str, list[Result]] = {name: [] for name in names}
    for number in runs:
        for place, name in enumerate(names):
            results[name].append(_answer(engine, prompt, name, case.max_tokens))
            if on_progress is not None:
                on_progress(number * len(names) + place + 1, len(runs) * len(names))
    return [_outcome(name, results[name][1:], results["full"][1:]) for name in names]


def render(outcomes: list[Outcome]) -> RenderableType:
    """A table of the policies, and under it their texts, for a rich console."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left")
    table.add_column("policy", overflow="fold")
    for name in ("TTFT ms", "faster", "prefix", "grafted", "redone", "fresh", "KL", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for o in outcomes:
        report = o.report
        tokens = (report.prefix_tokens, report.grafted_tokens, report.recomputed_tokens, report.fresh_tokens)
        times = (f"{1e3 * o.ttft_s:.1f}", f"{o.speedup:.2f}")
        table.add_row(o.policy, *times, *map(str, tokens), f"{o.first_kl:.4f}", f"{o.agreement:.0%}")
    table.caption = (
        "prefix, grafted, fresh: tokens; redone: grafted tokens recomputed in the last layer; KL: first token, full "
        "against policy, nats; same: tokens of full's answer found at the same place"
    )
    texts = Table(box=None, pad_edge=False, show_header=False)
    for o in outcomes:
        texts.add_row(o.policy, Text(o.text))
    return Group(table, texts)


def _answer(engine: Engine, prompt: list[Part], policy: str, max_tokens: int) -> Result:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(prompt, policy, sampling, remember=False, return_logits=True)
    engine.read_documents(request)
    [result] = engine.generate([request])
    if result.error:
        raise ValueError(result.error)
    return result


def _outcome(name: str, results: list[Result], full: list[Result]) -> Outcome:
    ours, truth = results[-1], full[-1]
    equal = [a == b for a, b in zip(ours.token_ids, truth.token_ids, strict=False)]
    length = max(len(ours.token_ids), len(truth.token_ids))
    return Outcome(
        policy=name,
        ttft_s=median([result.report.ttft_s for result in results]),
        speedup=median([f.report.ttft_s / r.report.ttft_s for f, r in zip(full, results, strict=True)]),
        first_kl=first_token(_logits(ours), _logits(truth))["kl"],
        first_token_equal=equal[0],
        agreement=sum(equal) / length,
        text=ours.text,
        report=ours.report,
    )


def _logits(result: Result) -> Tensor:
    if result.first_logits is None:
        raise ValueError("the answer needs its first logits")
    return result.first_logits
