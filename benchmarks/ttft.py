"""Time to first token against full recomputation, against transformers, and against the FLOP floor.

A random-weight Qwen3-shaped model reads documents once; then prompts of several lengths and reuse
shares, with the documents in another order, run under every policy in turn in one process, the
default policy first. New text stands before and behind the documents, or (interleaved) before each
of them. Medians and ratios are printed.

    python benchmarks/ttft.py [--long] [--dtype bfloat16] [--runs 5] [--json]
"""

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer, models

from kvgraft import Engine, Policy, Request, SamplingParams
from kvgraft.engine.config import ModelConfig
from kvgraft.engine.request import Report as RequestReport
from kvgraft.policies import Full, Naive, SparseX, Spread, Transitive
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.spreading import Spreading

DOCUMENT_TOKENS = 512  # before the reuse share is cut out of the prompt
INTERLEAVED_REUSE = 0.5
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class PolicyTimes:
    """One policy on one prompt shape; `floor_s` is full's time scaled by the FLOPs of the tokens
    actually computed."""

    tokens: int
    reuse: float
    interleaved: bool
    policy: str
    ttft_s: float
    speedup: float
    flop_share: float
    over_floor: float
    grafted: int
    recomputed: int
    stages_ms: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All rows; `full` holds per length the median seconds here and in transformers, and their
    median ratio."""

    configuration: dict[str, object]
    rows: list[PolicyTimes] = field(default_factory=list)
    full: dict[int, tuple[float, float, float]] = field(default_factory=dict)


SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
SHAPES = {
    "small": SHAPE,
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip


def make_model(
    folder: Path,
    layers: int,
    max_position: int,
    shape: Mapping[str, Any] = SHAPE,
    family: str = "qwen3",
    dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """A model with random weights; `device`: where they are drawn."""
    torch.manual_seed(0)
    config = model_config(layers, max_position, shape, family)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(4096)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def model_config(layers: int, max_position: int, shape: Mapping[str, Any], family: str) -> Any:
    """Return the transformers configuration of such a model."""
    sizes = {
        "vocab_size": 4096,
        "num_hidden_layers": layers,
        "max_position_embeddings": max_position,
    }
    rest = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(family, **sizes | rest | dict(shape))
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config


def make_prompts(
    tokens: int, reuse: float, seed: int, *, interleaved: bool = False
) -> tuple[list[int], list[int]]:
    """(what was read before, the prompt): the same documents in another order between new text."""
    random = np.random.default_rng(seed)
    known = round(tokens * reuse)
    documents = np.array_split(random.integers(1, 4096, known), max(1, known // DOCUMENT_TOKENS))
    new = random.integers(1, 4096, tokens - known)
    order = random.permutation(len(documents))
    if len(documents) > 1 and (order == np.arange(len(documents))).all():
        order = order[::-1]
    texts = np.array_split(new, len(documents) + 1) if interleaved else np.array_split(new, 2)
    notes = [*texts[1:-1], *[new[:0]] * len(documents)]  # one before each document but the first
    read = np.concatenate([random.integers(1, 4096, 7), *documents])
    middle = (
        part for pair in zip((documents[i] for i in order), notes, strict=False) for part in pair
    )
    prompt = np.concatenate([texts[0], *middle, texts[-1]])
    return read.tolist(), prompt.tolist()


def flops_of_layer(config: ModelConfig, positions: torch.Tensor) -> float:
    """FLOPs of one layer for tokens at these positions: linear parts, and attention to everything
    before them."""
    q_size = config.num_heads * config.head_dim
    weights = config.hidden_size * (q_size + 3 * config.intermediate_size)
    attention = 2 * weights * positions.numel() + 4 * q_size * (positions + 1).sum()
    return float(attention) + flops_of_projection(config, positions.numel())


def flops_of_projection(config: ModelConfig, tokens: int) -> float:
    """FLOPs of the queries, keys and values of a layer."""
    size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return float(2 * config.hidden_size * size * tokens)


@dataclass(frozen=True)
class Counting(Policy):
    """Another policy, with the FLOPs of all layers and projections that it computes added up in
    `flops`."""

    name: ClassVar[str] = "counting"
    policy: Policy
    config: ModelConfig
    flops: list[float]

    def recover(self, ctx: PrefillContext) -> Hidden:
        compute, project = ctx.layer, ctx.project

        def counted(index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
            self.flops.append(flops_of_layer(self.config, ctx.plan.positions[hidden.where]))
            return compute(index, hidden, spreading)

        def counted_projection(index: int, hidden: Hidden) -> None:
            self.flops.append(flops_of_projection(self.config, int(hidden.where.sum())))
            project(index, hidden)

        ctx.layer, ctx.project = counted, counted_projection  # type: ignore[method-assign]
        return self.policy.recover(ctx)

    def __hash__(self) -> int:
        return id(self)


def answer(engine: Engine, prompt: list[int], policy: Policy) -> RequestReport:
    return engine.generate([Request(prompt, policy, ONE_TOKEN, remember=False)])[0].report


def measure(
    engine: Engine,
    tokens: int,
    reuse: float,
    policies: dict[str, Policy],
    runs: int,
    *,
    interleaved: bool = False,
) -> list[PolicyTimes]:
    """All policies in turn, `runs` times after a warm-up."""
    engine.clear_cache()
    read, prompt = make_prompts(
        tokens, reuse, seed=tokens + round(1000 * reuse), interleaved=interleaved
    )
    engine.generate([Request(read, Full(), ONE_TOKEN)])
    flops: dict[str, float] = {}
    reports: dict[str, list[RequestReport]] = {name: [] for name in policies}
    for number in range(runs + 1):
        for name, policy in policies.items():
            if number == 0:
                counting = Counting(policy, engine.config, [])
                answer(engine, prompt, counting)
                flops[name] = sum(counting.flops)
            else:
                reports[name].append(answer(engine, prompt, policy))
    rows = []
    for name, mine in reports.items():
        ratios = [full.ttft_s / r.ttft_s for full, r in zip(reports["full"], mine, strict=True)]
        speedup, share = statistics.median(ratios), flops[name] / flops["full"]
        stages = {
            stage: 1e3 * statistics.median(r.stages.get(stage, 0.0) for r in mine)
            for stage in mine[0].stages
        }
        ttft = statistics.median(r.ttft_s for r in mine)
        last = mine[-1]
        rows.append(
            PolicyTimes(tokens, reuse, interleaved, name, ttft, speedup, share,
            1 / (speedup * share),
                        last.grafted_tokens, last.recomputed_tokens, stages)
        )  # fmt: skip
    return rows


def against_transformers(
    engine: Engine, folder: Path, tokens: int, runs: int
) -> tuple[float, float, float]:
    """Median seconds of full prefill here and in transformers with SDPA, and the median of the
    paired ratios."""
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", dtype=engine.decoder.dtype
        )
        .eval()
        .to(engine.decoder.device)
    )
    prompt = make_prompts(tokens, 0.0, seed=1)[1]
    ours, theirs = [], []
    for _ in range(runs + 1):
        engine.clear_cache()
        ours.append(answer(engine, prompt, Full()).ttft_s)
        given = torch.tensor([prompt], device=engine.decoder.device)
        start = time.perf_counter()
        with torch.inference_mode():
            model(given, use_cache=True, logits_to_keep=1).logits.cpu()
        theirs.append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(ours[1:], theirs[1:], strict=True)]
    return statistics.median(ours[1:]), statistics.median(theirs[1:]), statistics.median(ratios)


def policies_for(layers: int) -> dict[str, Policy]:
    """Full, the default policy, naive reuse, and SparseX over boundaries of 0, 1 layer and 20 % of
    the layers."""
    settings = ((0, 0.05), (1, 0.05), (1, 0.10), (round(0.2 * layers), 0.10))
    sparse = {
        f"sparsex b{boundary} k{topk:.2f}": SparseX(boundary_layers=boundary, recompute_share=topk)
        for boundary, topk in settings
    }
    return {
        "full": Full(),
        "spread": Spread(),
        "transitive": Transitive(),
        "naive": Naive(),
        **sparse,
    }


def main(
    lengths: Annotated[list[int], typer.Option("--tokens")] = [2048, 4096, 8192],  # noqa: B006
    reuses: Annotated[list[float], typer.Option("--reuse")] = [0.5, 0.75, 0.9, 0.98],  # noqa: B006
    long: Annotated[bool, typer.Option("--long", help="16384 tokens as well.")] = False,
    layers: int = 12,
    dtype: str = "float32",
    runs: int = 3,
    threads: int = 0,
    shape: Annotated[str, typer.Option(help=" | ".join(SHAPES))] = "small",
    device: str = "cpu",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the JSON to this file as well, after every table.")
    ] = None,
) -> None:
    """Print time to first token of every policy, the ratio to full, and the distance to the FLOP
    floor."""
    torch.set_num_threads(threads or torch.get_num_threads())
    lengths = [*lengths, 16384] if long else lengths
    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape {shape!r}: allowed are {', '.join(SHAPES)}")
    report = Report(_configuration(layers, dtype, runs, shape, device))
    console = Console(quiet=as_json)
    console.print(", ".join(f"{key} {value}" for key, value in report.configuration.items()))
    with (
        tempfile.TemporaryDirectory() as name,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        folder = Path(name)
        make_model(folder, layers, 2 * max(lengths), SHAPES[shape], dtype=dtype, device=device)
        pages = 5 * max(lengths) // 2 // 16
        engine = Engine(
            folder, dtype=dtype, device=device, num_pages=pages, max_prefill_tokens=max(lengths)
        )
        layouts = [*((reuse, False) for reuse in reuses), (INTERLEAVED_REUSE, True)]
        task = progress.add_task("measuring", total=len(lengths) * (len(layouts) + 1))
        for tokens in lengths:
            progress.update(task, description=f"{tokens} tokens, against transformers")
            report.full[tokens] = against_transformers(engine, folder, tokens, runs)
            progress.advance(task)
            for reuse, interleaved in layouts:
                progress.update(task, description=f"{tokens} tokens, {reuse:.0%} reuse")
                rows = measure(
                    engine, tokens, reuse, policies_for(layers), runs, interleaved=interleaved
                )
                report.rows.extend(rows)
                console.print(table_of(rows))
                if save is not None:
                    save.write_text(json.dumps(asdict(report), indent=1) + "\n")
                progress.advance(task)
                gc.collect()
    console.print(baseline_table(report))
    if as_json:
        print(json.dumps(asdict(report)))


def _configuration(
    layers: int, dtype: str, runs: int, shape: str, device: str
) -> dict[str, object]:
    sizes = SHAPES[shape]
    heads = (
        f"{sizes['num_attention_heads']}/{sizes['num_key_value_heads']} heads of "
        f"{sizes['head_dim']}"
    )
    cpu = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2] for line in cpu.read_text().splitlines() if "model name" in line]
        if cpu.exists()
        else []
    )
    return {
        "model": f"Qwen3-shaped, random weights, {layers} layers, "
        f"hidden {sizes['hidden_size']}, {heads}, "
        f"FFN {sizes['intermediate_size']}",
        "device": device,
        "dtype": dtype,
        "block size": 16,
        "runs": runs,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": names[0].strip() if names else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table_of(rows: list[PolicyTimes]) -> Table:
    """One prompt shape; `floor` is the speed-up that the FLOPs alone would allow."""
    layout = ", interleaved" if rows[0].interleaved else ""
    table = Table(
        "policy",
        title=f"{rows[0].tokens} tokens, {rows[0].reuse:.0%} reused{layout}",
        box=box.MARKDOWN,
    )
    for name in ("TTFT ms", "speed-up", "floor", "time/floor", "FLOPs", "grafted", "redone"):
        table.add_column(name, justify="right")
    for r in rows:
        times = (
            f"{1e3 * r.ttft_s:.0f}",
            f"{r.speedup:.2f}",
            f"{1 / r.flop_share:.2f}",
            f"{r.over_floor:.2f}",
        )
        table.add_row(r.policy, *times, f"{r.flop_share:.1%}", str(r.grafted), str(r.recomputed))
    return table


def baseline_table(report: Report) -> Table:
    """Full prefill here against transformers."""
    table = Table("tokens", title="full prefill is no straw man", box=box.MARKDOWN)
    for name in ("full ms", "transformers SDPA ms", "transformers / full"):
        table.add_column(name, justify="right")
    for tokens, (ours, theirs, ratio) in report.full.items():
        table.add_row(str(tokens), f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
