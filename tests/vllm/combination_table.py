"""Table of features that a server refuses together, on the page docs/combinations.md.

`python tests/vllm/combination_table.py` writes it. Each pair in vLLM is one run of what `kvgraft
serve --check` does, in this process, and each pair in the native engine is an engine; `--print`
only prints the table."""

import json
import os
import re
import sys
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "vllm")]

from kvgraft import Engine, Request, SamplingParams, Segment  # noqa: E402
from kvgraft.kv.heads import HEAD_MAP_FILE  # noqa: E402
from kvgraft.store import StoreOptions  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
BEGIN, END = (
    "<!-- combinations: written by tests/vllm/combination_table.py -->\n",
    "<!-- end of combinations -->\n",
)
HEAD = ("| host | feature | refused with | reason |", "|---|---|---|---|")
MAP = "HEAD_MAP"  # replaced by the path of the model's head map
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 3}
# policies that a server may have as its default, and what it is started with
POLICIES = {
    "policy `redknot`": ["--kvgraft-policy", "redknot", "--kvgraft-head-map", MAP],
    "policies `samkv`, `condense`": ["--kvgraft-policy", "condense"],
}
FEATURES = {
    "near-duplicates": ["--kvgraft-match", "similar"],
    "flow": ["--flow", "quest"],
    "per-head KV eviction": ["--kvgraft-head-paging", "--kvgraft-head-map", MAP],
    "segment store": ["--kvgraft-store-ram-gib", "1"],
    "residual streams": ["--kvgraft-residual-layers", "1"],
    "idle refresh": ["--kvgraft-idle-refresh", "0.01"],
    "guard": ["--kvgraft-guard", "0.01"],
    "FP8 KV cache": ["--kv-cache-dtype", "fp8"],
    "LoRA": ["--enable-lora"],
    "n-gram drafts": ["--speculative-config", json.dumps(NGRAM)],
    "draft model": ["--speculative-config", json.dumps(DRAFT)],
    "tensor parallelism": ["--tensor-parallel-size", "2"],
    "data parallelism": ["--data-parallel-size", "2"],
}
# what the native engine has of these: keywords of `Engine`
NATIVE: dict[str, dict[str, Any]] = {
    "policy `redknot`": {"policy": "redknot"},
    "policies `samkv`, `condense`": {"policy": "condense"},
    "near-duplicates": {"match": "similar"},
    "flow": {"flow": "quest"},
    "per-head KV eviction": {"head_paging": True},
    "segment store": {"store": StoreOptions(ram_gib=0.01)},
    "residual streams": {"residual_layers": [1]},
}
# kind of model -> family
MODELS = {
    "windows (Gemma 3)": "Gemma 3",
    "windows and sinks (gpt-oss)": "gpt-oss",
    "experts (Mixtral)": "Mixtral",
    "images (Qwen2.5-VL)": "Qwen2.5-VL",
}
PLAIN = "Llama"
# end of a reason that lists what is allowed
LIST = re.compile(r":? ?(supported|allowed) are .*$")


def reason(model: Path, *features: str) -> str | None:
    """Return why a server does not start with these features; None if it does."""
    from kvgraft.server.serve import summarize

    known = FEATURES | POLICIES
    given = [argument for feature in features for argument in known[feature]]
    head_map = str(model / HEAD_MAP_FILE)
    arguments = [item.replace(MAP, head_map).replace("MODEL", str(model)) for item in given]
    fixed = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 26), "--port", "0"]
    try:
        off = summarize([str(model), *fixed, *arguments]).off
    except ValueError as error:
        return _shortened(str(error), model)
    for feature in features:
        name = feature.replace("`", "")
        if name in off and "unsupported_model" in off[name]:
            return "requests with it are computed in full (`unsupported_model`)"
    return None


def native_reason(model: Path, *features: str) -> str | None:
    """Return why the native engine does not start with these features, or does not reuse text
    under them; None if it does."""
    keywords: dict[str, Any] = {}
    for feature in features:
        keywords |= NATIVE[feature]
    parts = [Segment("The first document. " * 20), Segment("Another one. " * 20), "Why?"]
    try:
        with Engine(model, max_length=1024, num_pages=64, **keywords) as engine:
            [result] = engine.generate([Request(parts, sampling=SamplingParams(1))])
    except ValueError as error:
        return _shortened(str(error), model)
    refusal = result.report.fallback
    return f"requests with it are computed in full (`{refusal}`)" if refusal else None


def _pairs(features: Iterable[str]) -> list[tuple[str, str]]:
    """Each two features that one server may have."""
    return [pair for pair in combinations(features, 2) if not set(pair) <= POLICIES.keys()]


def _shortened(text: str, model: Path) -> str:
    """Return the first reason in a message, without paths and prefixes."""
    text = re.sub(r"^KVGraft cannot run with |^flow '\w+' cannot be followed with ", "", text)
    text = text.partition("; ")[0].replace(str(model), "the model")
    return LIST.sub("" if "tested" in text else " is not supported", text)


def rows(folder: Path) -> list[str]:
    """All lines of the table."""
    import multimodal
    from families import make_family

    def make(family: str) -> Path:
        build = multimodal.make_apart if family in multimodal.FAMILIES else make_family
        build(family, folder / family)
        return folder / family

    plain = make(PLAIN)
    found = []
    for pair in _pairs([*POLICIES, *FEATURES]):
        if "--speculative-config" in FEATURES.get(pair[0], ()) and "draft model" in pair:
            continue
        if why := reason(plain, *pair):
            found.append(("vLLM", *pair, why))
    for (kind, family), feature in product(MODELS.items(), [*POLICIES, *FEATURES]):
        model = folder / family if (folder / family).exists() else make(family)
        has_map = (model / HEAD_MAP_FILE).exists()
        if MAP in (FEATURES | POLICIES)[feature] and not has_map:
            why = "the native engine, which makes head maps, cannot run it"
            found.append(("vLLM", kind, feature, why))
        elif why := reason(model, feature):
            found.append(("vLLM", kind, feature, why))
    for pair in _pairs(NATIVE):
        if why := native_reason(plain, *pair):
            found.append(("native", *pair, why))
    return [f"| {' | '.join(row)} |" for row in found]


def table() -> str:
    """The table as it is now."""
    with TemporaryDirectory() as folder:
        return "\n".join([*HEAD, *rows(Path(folder)), ""])


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no table
    found = table()
    if "--print" in sys.argv:
        print(found, file=answers, end="", flush=True)
        return
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + BEGIN + found + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
