"""Search for the layer that finds a needle, by KV deviation and by the attention of the last query
(SparseX, Figures 5 and 6).

The first layer whose attention finds it is the `probe` of the policy `transitive`: keys can be
scored from that layer on.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import Part, Segment
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import SamplingParams
from kvgraft.policies import Full, Naive
from kvgraft.prefill.context import Policy
from kvgraft_lab.evaluate.metrics import kv_deviation
from kvgraft_lab.evaluate.needles import NeedleMaker, NeedleText
from kvgraft_lab.evaluate.recording import PrefillRecord, Recorded

# share of the tokens that count as a layer's most important
TOP_SHARE = 0.03
# share of the best layer's needles that a layer must find
ENOUGH = 0.75
ATTENTION, DEVIATION = "last-query attention", "KV deviation"


@dataclass(frozen=True)
class Finding:
    """Result of one layout of a text.

    Attributes:
        signal: deviation or attention.
        layout: place of the cue.
        chosen: bool [L, T], the top tokens of each layer.
        needle: tokens of the needle.
    """

    signal: str
    layout: str
    chosen: np.ndarray
    needle: range

    @property
    def found(self) -> np.ndarray:
        """True for layers with a needle token among their top tokens, bool [L]."""
        return np.asarray(self.chosen[:, self.needle.start : self.needle.stop].any(1))


@dataclass(frozen=True)
class Survey:
    """Results of many texts.

    Attributes:
        found: share of the texts whose needle is among the layer's top tokens, [L] by signal and
            layout.
        texts: number of texts.
    """

    found: dict[tuple[str, str], np.ndarray]
    texts: int

    @property
    def probe(self) -> int:
        """First layer whose attention finds, in both layouts, three quarters of the best layer's
        needles.
        """
        worst = np.min(
            [shares for (signal, _), shares in self.found.items() if signal == ATTENTION], axis=0
        )
        return int((worst >= ENOUGH * worst.max()).nonzero()[0][0])


def survey(
    engine: Engine, make: NeedleMaker, seeds: range, on_progress: OnProgress | None = None
) -> Survey:
    """Survey one text for each seed."""
    hits: dict[tuple[str, str], list[np.ndarray]] = {}
    for done, seed in enumerate(seeds, 1):
        for finding in find_needle(engine, make(seed)):
            hits.setdefault((finding.signal, finding.layout), []).append(finding.found)
        if on_progress is not None:
            on_progress(done, len(seeds))
    return Survey({key: np.mean(found, axis=0) for key, found in hits.items()}, len(seeds))


def draw(engine: Engine, made: NeedleText, directory: Path) -> None:
    """Draw Figures 5 and 6 of one text."""
    from kvgraft_lab.evaluate.plots import write_layers  # matplotlib takes a second to load

    directory.mkdir(parents=True, exist_ok=True)
    drawn = find_needle(engine, made)
    for name, signal in (("figure5_kv_deviation", DEVIATION), ("figure6_attention", ATTENTION)):
        panels = [
            (f"{f.signal}, {f.layout}", f.chosen, f.needle) for f in drawn if f.signal == signal
        ]
        write_layers(panels, directory / f"{name}.png")


def render(found: Survey) -> RenderableType:
    """Return a line for each layer, for a rich console."""
    table = Table(
        title=f"texts (of {found.texts}) whose needle is among the layer's top {TOP_SHARE:.0%}",
        title_justify="left",
    )
    for name in ("layer", *(f"{signal}, {layout}" for signal, layout in found.found)):
        table.add_column(name, justify="right", overflow="fold")

    for layer, shares in enumerate(zip(*found.found.values(), strict=True)):
        table.add_row(str(layer), *(f"{share:.0%}" for share in shares))
    return Group(
        table,
        Text(
            f"attention first finds the needle in layer {found.probe}: "
            f"transitive:probe_layers={found.probe}"
        ),
    )


def find_needle(engine: Engine, made: NeedleText) -> list[Finding]:
    """Return each layer's top tokens in a text that was read without the cue. The cue stands before
    the text, or after it.
    """

    def count(piece: str) -> int:
        return len(engine.tokenizer.encode(piece, add_special_tokens=False))

    layouts = {
        "cue before the needle": (made.cue, made.text),
        "cue after the needle": ("", made.text, made.cue),
    }
    findings = []
    for layout, parts in layouts.items():
        first = count(f"{parts[0]}\n") if parts[0] else 0
        needle = range(
            first + count(made.before.rstrip()), first + count(made.before + made.needle)
        )
        naive, full = _records(engine, parts, made.text, made.question)
        deviation = _deviation(naive, full)
        attention = torch.stack([full.scores[index] for index in sorted(full.scores)])
        for signal, scores in ((DEVIATION, deviation), (ATTENTION, attention)):
            findings.append(Finding(signal, layout, _top(scores, full), needle))
    return findings


def _records(
    engine: Engine, parts: tuple[str, ...], known: str, question: str
) -> tuple[PrefillRecord, PrefillRecord]:
    engine.clear_cache()
    sampling = SamplingParams(max_tokens=1)
    read: list[Part] = ["the old door closed . ", Segment(f"{known}\n")]
    engine.generate([Request(read, "full", sampling)])
    prompt: list[Part] = [
        Segment(f"{part}\n") if part == known else f"{part}\n" for part in parts if part
    ]
    prompt.append(question)
    records = []
    policies: tuple[Policy, ...] = (Naive(), _Dense())

    for policy in policies:
        recorded = Recorded(policy, keep_cache=True, score_layers=isinstance(policy, _Dense))
        [result] = engine.generate([Request(prompt, recorded, sampling, remember=False)])
        if result.error:
            raise ValueError(result.error)
        records.append(recorded.record)

    return records[0], records[1]


class _Dense(Full):
    """Full recomputation with a plan that knows what could be grafted."""

    uses_grafts = True


def _deviation(naive: PrefillRecord, full: PrefillRecord) -> Tensor:
    """Return the deviation of keys plus that of values, float32 [L, T]."""
    if naive.keys is None or naive.values is None or full.keys is None or full.values is None:
        raise ValueError("both records need their cache")
    pairs = ((naive.keys, full.keys), (naive.values, full.values))
    return sum(
        (
            torch.stack([kv_deviation(ours, truth) for ours, truth in zip(*pair, strict=True)])
            for pair in pairs
        ),
        torch.zeros(()),
    )


def _top(scores: Tensor, record: PrefillRecord) -> np.ndarray:
    """Return the best share of the grafted tokens in each layer, bool [L, T]."""
    if record.plan is None:
        raise ValueError("nothing was recorded")
    return torch.stack(
        [record.plan.top_share(row, TOP_SHARE, among=record.plan.grafted) for row in scores]
    ).numpy()
