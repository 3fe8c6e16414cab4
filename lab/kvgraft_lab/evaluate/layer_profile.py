"""Offline profile of a model's layers that agree on the most important block (SamKV, Appendix A.2,
Figure 8).

The most important block of a text is the one whose representative token receives most attention, by
mean rank over all layers. A layer agrees if this block stands out from all others in it (three
standard deviations). N* are the layers in the upper half that agree most often. SamKV uses them to
decide how much of a document to keep.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.engine.engine import Engine
from kvgraft.engine.layers import NativeLayers
from kvgraft.kv.documents import BlockCut
from kvgraft.kv.importance import exceptionally_small, ranks
from kvgraft.kv.profiles import LayerProfile, last_layers
from kvgraft.methods import require_at_least
from kvgraft.prefill.documents.reading import read_document
from kvgraft_lab.evaluate.tasks import ENGLISH, Shape, find_suites

# for the testbed's models
TESTBED_SUITES = "ruler,multihop,multidoc,chat"
# least number of middle blocks for one to stand out
FEWEST_BLOCKS = 11


def generated_texts(
    engine: Engine, *, seed: int, count: int, length: int, block: int, testbed: bool = False
) -> dict[str, list[list[int]]]:
    """Return `count` texts of each suite, without questions.

    Args:
        testbed: True for the bundled model and its relatives, which read no English.

    Raises:
        ValueError: fewer than one text, or texts that are too short for blocks of this size.
    """
    if count < 1:
        raise ValueError(f"texts must be at least 1, got {count}")
    found = {}
    suites = find_suites(TESTBED_SUITES) if testbed else find_suites(ENGLISH, "dev")
    shape = Shape(length) if testbed else Shape(length, 2)
    for suite in suites:
        asked = (item.phase_2 for item in suite.items(seed, count, shape) if item.phase_2)
        texts = ["\n".join(asks[0].segments[:-1]) for asks in islice(asked, count)]
        if not texts:
            raise ValueError(f"{suite.name} has no text of {length} tokens: choose more")
        found[suite.name] = [_check(engine.encode(text)[:length], block) for text in texts]
    return found


def user_texts(
    engine: Engine, texts: Mapping[str, str], *, count: int, length: int, block: int
) -> dict[str, list[list[int]]]:
    """Return the first `count` stretches of `length` tokens of each of the user's texts.

    Raises:
        ValueError: a text is too short, or a stretch is too short for blocks of this size.
    """
    found = {}
    for name, text in texts.items():
        tokens = engine.encode(text)
        stretches = [
            tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)
        ]
        if not stretches:
            raise ValueError(f"{name} has {len(tokens)} tokens: texts of {length} are wanted")
        found[name] = [_check(stretch, block) for stretch in stretches[:count]]
    return found


@torch.inference_mode()
def survey(
    engine: Engine,
    texts: Mapping[str, Sequence[list[int]]],
    block: int,
    on_progress: OnProgress | None = None,
) -> dict[str, np.ndarray]:
    """Return for each data set the share of texts whose most important block stands out in each
    layer, float64 [L].
    """
    layers, blocks = NativeLayers(engine.decoder, engine.memory.cache), BlockCut(block)
    found, total, done = {}, sum(map(len, texts.values())), 0
    for name, stretches in texts.items():
        agreeing = np.zeros(engine.config.num_layers)
        for tokens in stretches:
            document = read_document(layers, np.array(tokens), blocks)
            middle = blocks.middle(len(tokens))
            agreeing += agreement(document.attention[:, middle.start : middle.stop]).numpy()
            done += 1
            if on_progress is not None:
                on_progress(done, total)
        found[name] = agreeing / len(stretches)
    return found


def agreement(attention: torch.Tensor) -> torch.Tensor:
    """Return whether the most important block over all layers stands out in each layer: bool [L]
    from attention [L, B].
    """
    best = int(ranks(-attention).float().mean(0).argmin())
    return torch.stack([exceptionally_small(-layer)[best] for layer in attention])


def profile(model: str, found: Mapping[str, np.ndarray], threshold: float) -> LayerProfile:
    """Return the profile with N*, the layers of the upper half that reach this share of the best
    one's score.

    If no layer has a score above 0, N* is the last eighth.

    Raises:
        ValueError: the threshold is not a share.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be in (0, 1], got {threshold}")
    scores = np.mean(list(found.values()), axis=0)
    upper = np.arange(len(scores)) >= len(scores) // 2
    chosen = np.flatnonzero(upper & (scores > 0) & (scores >= threshold * scores[upper].max()))
    stable = tuple(chosen.tolist()) or last_layers(len(scores))
    return LayerProfile(model, stable, tuple(round(float(score), 4) for score in scores))


def render(found: Mapping[str, np.ndarray], profiled: LayerProfile) -> RenderableType:
    """Return a line for each layer, for a rich console."""
    table = Table(
        title="texts whose most important block stands out in a layer", title_justify="left"
    )
    for name in ("layer", *found, "mean"):
        table.add_column(name, justify="right")
    for layer, scores in enumerate(zip(*found.values(), profiled.scores, strict=True)):
        table.add_row(str(layer), *(f"{score:.0%}" for score in scores))
    return Group(table, Text(f"stable layers (N*): {', '.join(map(str, profiled.stable))}"))


def _check(tokens: list[int], block: int) -> list[int]:
    require_at_least("block", block, 1)
    if (found := len(BlockCut(block).middle(len(tokens)))) < FEWEST_BLOCKS:
        raise ValueError(
            f"length must give {FEWEST_BLOCKS} blocks of {block} tokens between the first and the "
            f"last two, got {found}"
        )
    return tokens
