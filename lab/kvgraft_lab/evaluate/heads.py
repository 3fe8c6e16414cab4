"""Offline profile of a model's KV heads, and the resulting head map (RedKnot, 3.2).

Every sample is one text behind two prefixes of equal length. A head that attends outside sinks and
window must keep all tokens. If its output for the text also shifts with the prefix, its cached KV
is wrong behind another prefix. Attention does not always show which heads matter. So the
alternative criterion measures the effect: how the output changes if one head sees only a window.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from random import Random
from typing import Literal, get_args

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import tokenise
from kvgraft.engine.decoder import Decoder, causal_attention
from kvgraft.engine.engine import Engine
from kvgraft.guard.distances import kl_divergence
from kvgraft.kernels.layout import in_window
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft_lab.evaluate.tasks import ENGLISH, Ask, Item, Shape, find_suites
from kvgraft_lab.evaluate.tasks.own import make_own
from kvgraft_lab.evaluate.tasks.texts import CHARACTERS, ROOM

# suites with needles and retrieval, for the testbed's models
TESTBED_SUITES = "ruler,multihop"
# texts in a sample for other models
NUM_TEXTS = 4
# length of the prefix as a share of a sample's tokens
PREFIX = 0.25
# stretches of own text: two samples, and text for the prefixes of the last ones
LEAST_STRETCHES = 4
# least number of tokens of a sample
SHORTEST = 512
# shift below which cached KV of a head is right behind any prefix
ROBUST = 0.25
# queries whose attention weights are in memory at a time
ROWS = 256

Criterion = Literal["effect", "far-mass"]


@dataclass(frozen=True)
class TextSample:
    """Tokens of a text, and of two prefixes of equal length."""

    prefixes: tuple[list[int], list[int]]
    body: list[int]


@dataclass(frozen=True)
class Profile:
    """Result of all samples.

    Attributes:
        head_map: head map from all samples.
        samples: number of samples.
        agreement: share of heads with the same class from the first and the second half of the
            samples.
        kept_agreement: of the heads that either half keeps, the share that both keep.
    """

    head_map: HeadMap
    samples: int
    agreement: float
    kept_agreement: float


def testbed_samples(engine: Engine, *, seed: int, count: int, length: int) -> list[TextSample]:
    """Return needle and retrieval prompts in the testbed's language, with their questions.

    Raises:
        ValueError: fewer than two samples, or samples that are too short.
    """
    suites, shape = find_suites(TESTBED_SUITES), Shape(_body_size(count, length))
    per_task = -(-(count + 2) // sum(len(suite.tasks) for suite in suites))
    items = [suite.items(seed, per_task, shape) for suite in suites]
    asks = [item.phase_2[0] for item in _in_turn(items) if item.phase_2][: count + 2]
    if len(asks) < count + 2:
        raise ValueError(
            f"length must be greater than {length}: some texts are too short for a question"
        )
    return _pair(engine, asks, length)


def english_samples(engine: Engine, *, seed: int, count: int, length: int) -> list[TextSample]:
    """Return questions about documentation and about similar documents, each with the beginning of
    its answer.

    Raises:
        ValueError: fewer than two samples, or samples that are too short.
    """
    rng, shape = Random(seed), Shape(_body_size(count, length), NUM_TEXTS)  # noqa: S311
    suites, asks = find_suites(ENGLISH, "dev"), list[Ask]()
    for suite in suites:
        share = -(-(count + 2) // len(suites))
        items = suite.items(seed, -(-share // len(suite.tasks)), shape)
        asks += [rng.choice(item.phase_2) for item in rng.sample(items, share)]
    rng.shuffle(asks)  # so that the two halves of a profile hold both suites
    return _pair(engine, asks[: count + 2], length)


def own_samples(
    engine: Engine, texts: Mapping[str, str], *, seed: int, count: int, length: int
) -> list[TextSample]:
    """Return questions how passages of the user's own texts go on, each about other passages.

    They are fewer than `count` if the texts have no more.

    Raises:
        ValueError: fewer than two samples, or texts or samples that are too short.
    """
    size, whole = _body_size(count, length), "\n\n".join(texts.values())
    characters = len(whole) / max(1, len(engine.encode(whole)))  # of a token
    shape = Shape(max(256, round((size - ROOM) * characters / CHARACTERS) + ROOM), NUM_TEXTS)
    # passages end at white space, so a few more characters make as many of them
    stretch = round((shape.length - ROOM) * CHARACTERS * (1 + 0.5 / NUM_TEXTS))
    starts = range(0, len(whole) - stretch + 1, stretch)[: count + 2]
    if len(starts) < LEAST_STRETCHES:
        raise ValueError(
            f"the texts have {len(whole)} characters, and {LEAST_STRETCHES * stretch} are needed "
            f"for 2 samples of {length} tokens: give more text, or choose a smaller length"
        )
    suites = [make_own({"text": whole[start : start + stretch]}) for start in starts]
    items = [replace(one, tasks=("continuation",)).items(seed, 1, shape) for one in suites]
    return _pair(engine, [item.phase_2[0] for [item] in items], length)


def _body_size(count: int, length: int) -> int:
    """Return the tokens of a sample behind its prefix."""
    if count < 2:
        raise ValueError(f"samples must be at least 2, for two halves, got {count}")
    if length < SHORTEST:
        raise ValueError(f"length must be at least {SHORTEST} tokens, got {length}")
    return int(length * (1 - PREFIX))


def profile(
    engine: Engine,
    samples: Sequence[TextSample],
    *,
    sinks: int,
    window: int,
    share: float | None = None,
    threshold: float | None = None,
    by: Criterion = "effect",
    on_progress: OnProgress | None = None,
) -> Profile:
    """Measure all samples and classify the heads.

    Args:
        share: share of the heads to keep (rounded, at least one): those with the greatest effect,
            or with most attention outside sinks and window.
        threshold: alternative to `share`: keep the heads with at least this effect or attention.
        by: criterion, effect or attention.

    Raises:
        ValueError: numbers out of range, or a threshold that no head reaches.
    """
    if by not in get_args(Criterion):
        raise ValueError(f"unknown criterion {by!r}: choose from {', '.join(get_args(Criterion))}")
    if (share is None) == (threshold is None):
        raise ValueError("give either a share or a threshold")

    for name, value in (("share", share), ("threshold", threshold)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1], got {value}")

    if sinks < 0 or window < 1:
        raise ValueError(
            f"sinks must be at least 0 and window at least 1, got {sinks} and {window}"
        )

    shortest = min(len(prefix) + len(one.body) for one in samples for prefix in one.prefixes)
    if shortest <= sinks + window:
        raise ValueError(
            f"sinks and window see all of a sample of {shortest} tokens: choose a greater length"
        )

    measured = []

    for done, sample in enumerate(samples, 1):
        found = measure(engine.decoder, sample, sinks, window)
        if by == "effect":
            found = np.concatenate(
                (found, measure_effect(engine.decoder, sample, sinks, window)[None])
            )
        measured.append(found)
        if on_progress is not None:
            on_progress(done, len(samples))

    every = np.stack(measured)  # [samples, 2 or 3, L, Hkv]
    halves = [_classify_mean(every[start::2], share, threshold) for start in (0, 1)]
    kept = [np.array(half) != HeadClass.LOCAL for half in halves]
    classes, means = _classify_mean(every, share, threshold), every.mean(0)
    head_map = HeadMap(engine.config.identity, sinks, window, classes, *map(_rounded, means))
    head_map.check(engine.config.identity, engine.config.num_layers, engine.config.num_kv_heads)
    agreement = float((np.array(halves[0]) == np.array(halves[1])).mean())
    return Profile(
        head_map,
        len(samples),
        agreement,
        float((kept[0] & kept[1]).sum() / (kept[0] | kept[1]).sum()),
    )


def classify(
    shift: np.ndarray, need: np.ndarray, share: float | None, threshold: float | None
) -> tuple[tuple[HeadClass, ...], ...]:
    """Return the classes of heads from their shift and their need of far text, [L, Hkv] each.

    Kept heads are `retrieval` if their output hardly shifts with the prefix, else `global`.
    """
    if threshold is not None:
        kept = need >= threshold
    else:
        kept = np.zeros(need.shape, bool)
        kept.flat[
            np.argsort(-need, axis=None, kind="stable")[: max(1, round((share or 0) * need.size))]
        ] = True
    whole = np.where(shift < ROBUST, HeadClass.RETRIEVAL, HeadClass.GLOBAL)
    found = np.where(kept, whole, HeadClass.LOCAL)
    return tuple(tuple(HeadClass(name) for name in row) for row in found.tolist())


def _classify_mean(
    measured: np.ndarray, share: float | None, threshold: float | None
) -> tuple[tuple[HeadClass, ...], ...]:
    """Classify by the mean of the last measurement: [samples, 2 or 3, L, Hkv]."""
    means = measured.mean(0)
    return classify(means[0], means[-1], share, threshold)


@torch.inference_mode()
def measure_effect(decoder: Decoder, sample: TextSample, sinks: int, window: int) -> np.ndarray:
    """Return how much the token after the text depends on each head, float64 [L, Hkv].

    It is the KL divergence, in nats, of its distribution if only that head is limited to sinks and
    window; mean of both prefixes.
    """
    config = decoder.config
    total = np.zeros((config.num_layers, config.num_kv_heads))

    for prefix in sample.prefixes:
        layers = _Layers(decoder, len(prefix) + len(sample.body), sinks, window)
        states = [decoder.embed(torch.tensor([*prefix, *sample.body], device=decoder.device))]
        for layer in range(config.num_layers):
            states.append(layers.run(layer, states[-1]))
        whole = decoder.logits(states[-1][-1:])
        for layer in range(config.num_layers):
            for head in range(config.num_kv_heads):
                state = layers.run(layer, states[layer], head)
                for above in range(layer + 1, config.num_layers):
                    state = layers.run(above, state)
                total[layer, head] += float(kl_divergence(whole, decoder.logits(state[-1:])))

    return total / len(sample.prefixes)


class _Layers:
    """Layers of a decoder over one text, without a cache."""

    def __init__(self, decoder: Decoder, length: int, sinks: int, window: int) -> None:
        here = torch.arange(length, device=decoder.device)
        self.decoder = decoder
        self.cos, self.sin = decoder.config.rope.fresh_table(here)
        self.visible = in_window(here, here[:, None], sinks, window)

    def run(self, index: int, hidden: Tensor, windowed: int | None = None) -> Tensor:
        """Return the states [n, D] after a layer from those before it. With `windowed`, this KV
        head sees only sinks and window.
        """
        query, keys, values = self.decoder.project(index, hidden, self.cos, self.sin)
        scale = self.decoder.config.attention_scale
        attended = causal_attention(query, keys, values, scale)
        if windowed is not None:
            size = query.shape[1] // keys.shape[1]
            own, group = (
                slice(windowed, windowed + 1),
                slice(windowed * size, (windowed + 1) * size),
            )
            attended[:, group] = causal_attention(
                query[:, group], keys[:, own], values[:, own], scale, self.visible
            )
        return self.decoder.after_attention(index, hidden, attended.flatten(1))


@torch.inference_mode()
def measure(decoder: Decoder, sample: TextSample, sinks: int, window: int) -> np.ndarray:
    """Return shift and far mass of one sample, float64 [2, L, Hkv].

    The shift is |a - b| / sqrt(|a| |b|) of the attention outputs a and b of the text behind either
    prefix. The far mass is the mean attention of the text's tokens outside sinks and window. Both
    are the maximum over the query heads of a KV head.
    """
    runs = [
        _attend(decoder, [*prefix, *sample.body], len(prefix), sinks, window)
        for prefix in sample.prefixes
    ]
    found = []
    for (one, far), (other, far_again) in zip(*runs, strict=True):  # [n, Hkv, G, d], [n, Hkv, G]
        sizes = one.norm(dim=(0, 3)) * other.norm(dim=(0, 3))  # [Hkv, G]
        shift = (one - other).norm(dim=(0, 3)) / sizes.sqrt().clamp(min=1e-12)
        found.append(torch.stack((shift.amax(1), ((far + far_again) / 2).mean(0).amax(1))))
    return torch.stack(found, dim=1).double().cpu().numpy()


def _attend(
    decoder: Decoder, tokens: list[int], first: int, sinks: int, window: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each layer the attention outputs [n, Hkv, G, d] and the far mass [n, Hkv, G] of the
    tokens from `first` on.
    """
    config, device = decoder.config, decoder.device
    here = torch.arange(len(tokens), device=device)
    cos, sin = config.rope.fresh_table(here)
    hidden = decoder.embed(torch.tensor(tokens, device=device))

    for layer in range(config.num_layers):
        query, keys, values = decoder.project(layer, hidden, cos, sin)
        grouped = query.unflatten(1, (config.num_kv_heads, -1)) * config.attention_scale
        outputs, masses = [], []
        for start, stop in pairwise([*range(0, len(tokens), ROWS), len(tokens)]):
            at, past = here[start:stop, None], here[:stop]
            logits = torch.einsum(
                "nhgd,mhd->nhgm", grouped[start:stop].float(), keys[:stop].float()
            )
            weights = logits.masked_fill((past > at)[:, None, None], float("-inf")).softmax(-1)
            far = ~in_window(past, at, sinks, window)
            outputs.append(torch.einsum("nhgm,mhd->nhgd", weights, values[:stop].float()))
            masses.append((weights * far[:, None, None]).sum(-1))
        output = torch.cat(outputs)
        yield output[first:], torch.cat(masses)[first:]
        hidden = decoder.after_attention(layer, hidden, output.flatten(1).to(hidden.dtype))


def render(found: Profile) -> RenderableType:
    """Return a line for each layer, for a rich console."""
    head_map = found.head_map
    heads = len(head_map.classes[0])
    title, need = (
        ("effect of a window on the next token, KL in nats", head_map.effect)
        if head_map.effect
        else ("attention of KV heads outside sinks and window", head_map.far_mass)
    )
    table = Table(title=f"{title}; G global, R retrieval")
    for name in ("layer", *map(str, range(heads))):
        table.add_column(name, justify="right")

    for layer, classes in enumerate(head_map.classes):
        letters = ("" if name is HeadClass.LOCAL else name[0].upper() for name in classes)
        cells = (f"{letter}{value:.3f}" for letter, value in zip(letters, need[layer], strict=True))
        table.add_row(str(layer), *cells)

    total = len(head_map.classes) * heads
    return Group(
        table,
        Text(
            f"{head_map.num_kept} of {total} heads keep everything; maps of two halves of the "
            f"{found.samples} samples "
            f"agree in {found.agreement:.0%} of all heads and in {found.kept_agreement:.0%} of "
            "those kept"
        ),
    )


def _pair(engine: Engine, asks: Sequence[Ask], length: int) -> list[TextSample]:
    """Return each prompt, with the beginning of its answer, behind the beginnings of the two
    prompts after it."""
    prompts = ["\n".join(ask.segments) + ask.begun for ask in asks]
    texts = [tokenise(prompt, engine.encode).token_ids.tolist() for prompt in prompts]
    prefix, samples = int(length * PREFIX), []
    for body, *others in zip(texts, texts[1:], texts[2:], strict=False):
        one, other = (list(islice(cycle(text), prefix)) for text in others)
        samples.append(TextSample((one, other), body))
    return samples


def _in_turn(groups: Sequence[Sequence[Item]]) -> Iterator[Item]:
    longest = max(map(len, groups))
    return (group[place] for place in range(longest) for group in groups if place < len(group))


def _rounded(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(value), 4) for value in row) for row in values)
