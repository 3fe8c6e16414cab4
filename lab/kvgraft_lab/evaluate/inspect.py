"""Self-contained HTML page of one prompt: the kind of every token under every policy."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from kvgraft import __version__
from kvgraft.cli.progress import OnProgress
from kvgraft.core.plan import Kind
from kvgraft.core.prompt import parse_markers
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import SamplingParams
from kvgraft.policies import parse_policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft_lab.evaluate.compare import Case, PolicyOutcome, run_compare
from kvgraft_lab.evaluate.recording import PrefillRecord, Recorded


@dataclass(frozen=True)
class Inspection:
    """Content of the page.

    Attributes:
        model: name of the model.
        tokens: text of each prompt token.
        policies: one view per policy, see `_view`.
    """

    model: str
    tokens: tuple[str, ...]
    policies: tuple[dict[str, Any], ...]


def inspect(engine: Engine, case: Case, on_progress: OnProgress | None = None) -> Inspection:
    """Time the policies as `kvgraft compare` does, then run each once more and record it.

    Raises:
        ValueError: the engine cannot answer the prompt, or a policy keeps documents apart, so that
            tokens have no such kinds.
    """
    for name in case.policies:
        if isinstance(parse_policy(name), KeepsDocuments):
            raise ValueError(
                f"policy {name!r} keeps a part of documents: only policies that graft can be "
                "inspected"
            )

    outcomes = run_compare(engine, case, on_progress)
    prompt = parse_markers(case.prompt)
    views = []

    for outcome in outcomes:
        recorded = Recorded(parse_policy(outcome.policy), score_layers=True)
        [result] = engine.generate(
            [Request(prompt, recorded, SamplingParams(max_tokens=1), remember=False)]
        )
        if result.error:
            raise ValueError(result.error)
        views.append(_view(outcome, recorded.record))

    tokens = tuple(engine.tokenizer.decode([token]) for token in engine.token_ids(Request(prompt)))
    config = engine.config
    return Inspection(f"{config.architecture}, {config.num_layers} layers", tokens, tuple(views))


def _view(outcome: PolicyOutcome, record: PrefillRecord) -> dict[str, Any]:
    """Return the view of a policy: kinds p, g, f and r (grafted, then recomputed in the last layer)
    as one string, and scores by layer from 0 to 1.
    """
    if record.plan is None:
        raise ValueError("nothing was recorded")

    again = record.computed[-1] & record.plan.grafted
    letters = {Kind.PREFIX: "p", Kind.GRAFTED: "g", Kind.IN_PLACE: "g", Kind.FRESH: "f"}
    kinds = [letters[Kind(int(kind))] for kind in record.plan.kinds]
    scores = {
        str(layer): [round(float(score), 3) for score in scores / max(1e-9, float(scores.max()))]
        for layer, scores in sorted(record.scores.items())
    }
    report = outcome.report
    return {
        "policy": outcome.policy,
        "kinds": "".join(
            "r" if redone else kind for kind, redone in zip(kinds, again.tolist(), strict=True)
        ),
        "layers": record.computed.sum(0).tolist(),
        "scores": scores,
        "stages": {name: round(1e3 * seconds, 2) for name, seconds in report.stages.items()},
        "ttft": round(1e3 * outcome.ttft_s, 1),
        "speedup": round(outcome.speedup, 2),
        "kl": round(outcome.answer_kl, 4),
        "agreement": round(outcome.agreement, 3),
        "work": round(report.computed_share, 4),
        "fallback": report.fallback,
        "answer": outcome.text,
    }


def render_page(inspection: Inspection) -> str:
    """Return the page. It needs no other files."""
    data = {
        "tokens": inspection.tokens,
        "policies": inspection.policies,
        "num_layers": _num_layers(inspection),
    }
    template = files("kvgraft_lab.evaluate").joinpath("inspect.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    # inside a script element only these characters could end it or start a comment
    safe = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return environment.from_string(template).render(
        model=inspection.model,
        version=__version__,
        data=Markup(safe),  # noqa: S704
    )


def _num_layers(inspection: Inspection) -> int:
    return max(max(view["layers"], default=0) for view in inspection.policies)
