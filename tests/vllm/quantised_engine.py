"""An engine with our connector and quantised keys and values, or weights, that says of itself what
tests must know.

{"model": path, "engine": arguments of vllm.LLM} as JSON on stdin, what was found as the last line.
"""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import torch  # noqa: E402
from engines import EVERY_HEAD, EVERYTHING, NAIVE, OFF, Ask, words  # noqa: E402
from hosts import Host  # noqa: E402
from torch import Tensor  # noqa: E402

from kvgraft.kv.heads import HeadClass  # noqa: E402
from kvgraft.kv.rope import rotate  # noqa: E402
from kvgraft.methods import count_layers  # noqa: E402
from kvgraft.policies import RedKnot  # noqa: E402

ROUNDING = {"fp8": (2**-4, 2**-10), "fp8_e4m3": (2**-4, 2**-10), "fp8_e5m2": (2**-3, 2**-17)}
DOCUMENT, OTHER, OPENING = words(300, 1), words(200, 2), words(100, 3)
PROMPTS = [
    words(10, 4) + OTHER + DOCUMENT + words(5, 5),
    OPENING + words(40, 6) + OTHER + words(33, 7),
    words(1, 8) + DOCUMENT,
    words(90, 9),
]


def bound(exact: Tensor, cache_dtype: str, scale: float, slack: Tensor | float = 0.0) -> Tensor:
    """How far from a number the nearest one in eight bits may be: half a step, which is a share of
    normal numbers and the same for all smaller ones. Of numbers within range; `slack` is what they
    are wrong by before."""
    # no more than slack where nothing is quantised
    relative, least = ROUNDING.get(cache_dtype, (0.0, 0.0))
    return (exact.abs() * relative).clamp(min=least * scale) + torch.as_tensor(slack).abs()


def codes_while_decoding(
    host: Host, prompt: list[int], options: dict[str, Any], salt: str | None = None
) -> Any:
    """Codes of a prompt's keys and values, each [L, n, Hkv, d], when its first token has been
    generated; its answer."""
    name = host.add(Ask(prompt, options, salt, max_tokens=3))
    host.step_until(lambda: name in host.outputs)
    slots = host.slots(name)[: len(prompt)]
    pairs = [host.model.read_codes(layer, slots) for layer in range(host.model.num_layers)]
    keys, values = (torch.stack([pair[at].view(torch.uint8) for pair in pairs]) for at in (0, 1))
    return keys, values, slots, host.finish(name)[0]


def recomputed(host: Host, everything: dict[str, Any]) -> dict[str, Any]:
    """Everything is recomputed, so that codes are those of full prefill."""
    host.forget()
    host.read(OPENING + DOCUMENT, OTHER)
    together = host.ask(*[Ask(prompt, everything) for prompt in PROMPTS])
    keys, values, _, _ = codes_while_decoding(host, PROMPTS[0], everything)
    exact_keys, exact_values, _, _ = codes_while_decoding(host, PROMPTS[0], OFF, salt="another")
    return {
        "recomputed": [answer.tokens for answer in together],
        "recomputed_grafted": [answer.grafted > 150 for answer in together],
        "recomputed_prefix": [answer.report["prefix_tokens"] for answer in together],
        "different_codes": float(((keys != exact_keys) | (values != exact_values)).float().mean()),
        "relative_error": max(
            _error(host, *pair) for pair in ((keys, exact_keys), (values, exact_values))
        ),
    }


def _error(host: Host, codes: Tensor, exact: Tensor) -> float:
    """Of all numbers that these codes are, together."""
    found, expected = (part.view(host.model.code_dtype).float() for part in (codes, exact))
    return float((found - expected).norm() / expected.norm())


def grafted(host: Host, moved: int) -> dict[str, Any]:
    """A naive graft beside its source, which is overwritten by random numbers."""
    host.forget()
    before = words(128, 3)
    name = host.add(Ask(before + DOCUMENT, OFF, max_tokens=2))
    host.step_until(lambda: name in host.outputs)
    source = host.slots(name)[len(before) : len(before) + 288]
    host.finish(name)
    shape = (host.model.num_layers, len(source), host.model.num_kv_heads, host.model.head_dim)
    drawn = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(host.model.dtype)
        for seed in (0, 1)
    )
    host.write_kv(source, *drawn)
    held, held_values = host.read_kv(source)

    prompt = words(len(before) + moved, 4) + DOCUMENT
    name = host.add(Ask(prompt, NAIVE, max_tokens=3))
    host.step_until(lambda: name in host.outputs)
    slots = host.slots(name)
    [answer] = host.finish(name)
    [(start, stop)] = [(a, b) for a, b, kind in answer.report["spans"] if kind == "grafted"]
    keys, values = host.read_kv(slots[start:stop])
    cos, sin = host.model.plain_rope.table(torch.full((stop - start,), moved))
    turned = torch.stack([rotate(layer, cos, sin) for layer in held.float()])
    error = (keys - turned).abs()
    scale = host.model.attentions[0]._k_scale_float
    limit = bound(turned, host.model.cache_dtype, scale, slack=turned * 2**-7)
    return {
        "tokens": stop - start,
        "values": int((values != held_values[:, : stop - start]).sum()),
        "keys": int((keys != held[:, : stop - start]).sum()),
        "keys_over_bound": int((error > limit).sum()),
    }


def grafted_by_head(host: Host) -> dict[str, int]:
    """Of a document that is moved: how many codes of reused heads are not what a naive graft has,
    in deep layers, and in how many (token, layer, head) any number is another than it."""
    host.forget()
    host.read(DOCUMENT)
    prompt = words(45, 4) + DOCUMENT + words(5, 5)
    naive, naive_values, _, answer = codes_while_decoding(host, prompt, NAIVE)
    [(start, stop)] = [(a, b) for a, b, kind in answer.report["spans"] if kind == "grafted"]
    by_head = {"policy": "redknot:edge_mass_share=1.0,repair=off,recent_tokens=8,min_ffn_tokens=4"}
    keys, values, _, _ = codes_while_decoding(host, prompt, by_head)
    differs = ((keys != naive) | (values != naive_values))[:, start:stop].any(-1)  # [L, n, Hkv]
    heads = host.queue._head_map
    shallow = count_layers(None, RedKnot.dense_share, len(differs))
    reused = [
        heads.heads(layer, HeadClass.LOCAL, HeadClass.RETRIEVAL) for layer in range(len(differs))
    ]
    reused_deep = torch.tensor(reused) & (torch.arange(len(differs)) >= shallow)[:, None]
    return {
        "grafted": stop - start,
        "reused_but_other": int(differs.transpose(1, 2)[reused_deep].sum()),
        "computed_but_same": int((~differs).transpose(1, 2)[~reused_deep].sum()),
        "computed": int((~reused_deep).sum()) * (stop - start),
    }


def kept_apart(host: Host) -> dict[str, Any]:
    """Namespaces, exact prefixes, sources that are poisoned, and turns that go on with grafts."""
    host.forget()
    host.read(DOCUMENT)
    prompt = words(50, 4) + DOCUMENT + words(20, 5)
    [other] = host.ask(Ask(prompt, NAIVE, salt="another"))
    [right] = host.ask(Ask(prompt, OFF, salt="a third", max_tokens=40))
    [wrong] = host.ask(Ask(prompt, NAIVE, max_tokens=40))
    [exact] = host.ask(Ask(prompt, OFF, max_tokens=40))
    host.forget()
    host.read(DOCUMENT)
    [first] = host.ask(Ask(prompt, {"policy": "spread"}, max_tokens=40))
    [second] = host.ask(Ask(prompt + first.tokens + words(30, 7), {"policy": "spread"}))
    host.forget()
    host.read(DOCUMENT)
    host.poison(host.blocks_with_content())
    [poisoned] = host.ask(Ask(prompt, NAIVE, max_tokens=40))
    host.forget()
    host.read(DOCUMENT, OTHER)
    [kept] = host.ask(
        Ask(
            words(40, 4) + DOCUMENT + OTHER + words(20, 5),
            {"policy": "condense", "kept_share": 0.5},
        )
    )
    return {
        "other_namespace": other.grafted,
        "off": right.tokens,
        "exact": exact.tokens,
        "exact_cached": exact.cached,
        "poisoned": poisoned.tokens != wrong.tokens,
        "outcomes": [answer.report["outcome"] for answer in (first, second, kept)],
    }


def main(answers: IO[str]) -> None:
    """Ask, and print."""
    job = json.load(sys.stdin)
    host = Host(Path(job["model"]), **job["engine"])
    first = host.model.attentions[0]
    found = {
        "scales": [first._k_scale_float, first._v_scale_float],
        **recomputed(host, EVERYTHING),
        "grafts": {str(moved): grafted(host, moved) for moved in (-77, 45, 0)},
        **kept_apart(host),
    }
    if host.queue._head_map is not None:
        found |= {"by_head": recomputed(host, EVERY_HEAD), "grafts_by_head": grafted_by_head(host)}
    host.abandon()
    print(json.dumps(found | {"problems": host.problems()}), file=answers, flush=True)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
