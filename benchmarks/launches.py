"""What a recovery asks of a CUDA device, counted without one: launches, waits, uploads, bytes, by
policy.

A tiny random model reads eight documents, then a prompt with them in another order; a tenth of it
is new. Counts depend on the number of layers, hardly on their size or on the prompt's length. With
`--decode` it counts a decode step of the prompts instead, from the tokens before it to those that
it chooses, dense and under each flow.

    python benchmarks/launches.py [--host vllm] [--decode] [--tokens 2048] [--prompts 4] [--json]

With `--host vllm` recoveries run in vLLM's decoder layers (see `fake_vllm`); a stock layer is 12
launches."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from fake_device import FakeDevice, Kind, Operation
from kvgraft import Engine, Request, SamplingParams
from kvgraft.flows import DENSE, FLOWS
from kvgraft.policies import parse_policy
from tables import markdown_table
from ttft import make_model

POLICIES = ("full", "naive", "epic", "spread", "transitive", "sparsex", "cacheblend", "prophet")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
VOCAB, MAX_LENGTH, DOCUMENTS, KNOWN = 4096, 65536, 8, 0.9
VLLM_POLICIES = ("full", "naive", "epic", "cacheblend", "sparsex", "transitive", "spread")
VLLM_SHAPE = SHAPE | {"head_dim": 32}  # the least that vLLM's attention layers take
BEGINNING = 7  # tokens that are read before the documents
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
DECODED = (DENSE, *(f"{flow}:topk_blocks=8,layers_skip=none" for flow in FLOWS))  # flows
SHOWN = (
    Kind.LAUNCH,
    Kind.WAIT,
    Kind.WAITING_UPLOAD,
    Kind.UPLOAD,
    Kind.EVENT,
    Kind.HOST,
    Kind.VIEW,
    Kind.ALLOCATION,
)


class HostName(StrEnum):
    """What runs the recoveries."""

    NATIVE = "native"
    VLLM = "vllm"


def prompts(tokens: int, count: int, seed: int = 0) -> tuple[list[int], list[list[int]]]:
    """(what is read first, prompts of the same documents in other orders, between new text)."""
    random = np.random.default_rng(seed)
    documents = np.array_split(random.integers(1, VOCAB, round(tokens * KNOWN)), DOCUMENTS)
    made = []
    for _ in range(count):
        before, behind = np.array_split(
            random.integers(1, VOCAB, tokens - round(tokens * KNOWN)), 2
        )
        order = random.permutation(DOCUMENTS)
        made.append(
            np.concatenate([before, *[documents[number] for number in order], behind]).tolist()
        )
    return np.concatenate([random.integers(1, VOCAB, BEGINNING), *documents]).tolist(), made


def documents(tokens: int) -> list[range]:
    """Where they lie in what is read first, for prompts of so many tokens."""
    lengths = [len(part) for part in np.array_split(np.zeros(round(tokens * KNOWN)), DOCUMENTS)]
    return [
        range(first, stop) for first, stop in pairwise(np.cumsum([BEGINNING, *lengths]).tolist())
    ]


def counted(
    model: Path, policies: Sequence[str], tokens: int = 2048, count: int = 1, **options: Any
) -> dict[str, list[Operation]]:
    """All operations from admission to the first token of `count` prompts in one pass, under each
    policy."""
    read, asked = prompts(tokens, count)
    found = {}
    with torch.inference_mode(), FakeDevice() as device:
        pages = (count + 3) * tokens // 16 + 64
        room = 8 * tokens * count
        engine = Engine(
            model, dtype="bfloat16", device="cuda", num_pages=pages, max_prefill_tokens=room,
            enforce_eager=True,
            **options,
        )  # fmt: skip
        engine.generate([Request(read, "full", ONE_TOKEN)])
        for policy in policies:
            requests = [Request(prompt, policy, ONE_TOKEN, remember=False) for prompt in asked]
            engine.generate(requests)  # what is made once is there
            with device.counting() as operations:
                results = engine.generate(requests)
            if failures := [result.error for result in results if result.error]:
                raise ValueError(f"{policy}: {failures[0]}")
            found[policy] = operations
    return found


def counted_in_vllm(
    model: Path, policies: Sequence[str], tokens: int = 2048
) -> dict[str, list[Operation]]:
    """The same for vLLM's host: all operations of a recovery of one prompt."""
    from fake_vllm import LoadedModel, Recoveries  # imports vLLM

    (read, [asked]), loaded, found = prompts(tokens, 1), LoadedModel.of(model), {}
    with torch.inference_mode(), FakeDevice() as device:
        recover = Recoveries(loaded.host("cuda"), read, documents(tokens), asked)
        for policy in policies:
            recover(parse_policy(policy))  # what is made once is there
            recover.forget()
            with device.counting() as operations:
                recover(parse_policy(policy))
            found[policy] = operations
    return found


def counted_steps(
    model: Path, flows: Sequence[str], tokens: int = 2048, count: int = 1, **options: Any
) -> dict[str, list[Operation]]:
    """All operations of a decode step of `count` sequences under each flow, which is not their
    first; it computes the last token of a block."""
    size, found = 16, {}
    with torch.inference_mode(), FakeDevice() as device:
        pages = count * (tokens // size + 2)
        engine = Engine(
            model,
            dtype="bfloat16",
            device="cuda",
            num_pages=pages,
            block_size=size,
            enforce_eager=True,
            **options,
        )
        for pool in engine.memory.cache.pools:
            pool.normal_(generator=None)
        read = np.random.default_rng(0).integers(1, VOCAB, tokens - 3).tolist()
        for flow in flows:
            requests = [
                Request(read, "full", SamplingParams(9), namespace=str(n), flow=flow)
                for n in range(count)
            ]
            sequences = engine.occupy(requests)
            for sequence in sequences:
                sequence.tokens.append(read[0])
            engine.scheduler.step()
            engine.scheduler.step()
            with device.counting() as operations:
                engine.scheduler.step()
            found[flow] = operations
            engine.scheduler.abort(sequences)
    return found


def per_layer(
    few: Sequence[Operation], many: Sequence[Operation], kind: Kind, layers: int
) -> float:
    """Operations of a kind that each of `layers` more layers adds."""
    return (count_of(many, kind) - count_of(few, kind)) / layers


def count_of(operations: Sequence[Operation], kind: Kind, inside: str = "") -> int:
    """How many are of this kind, inside of a function of this name."""
    return sum(one.kind is kind and (not inside or inside in one.functions) for one in operations)


def moved(
    operations: Sequence[Operation], in_vllm: bool, layers: int, tokens: int, prompts: int
) -> float:
    """What launches that copy and change grafted KV read and write for each grafted token and
    layer, in KB of a model with 8 KV heads of 128 channels: as many times its 4 KB as here, where
    tables and indices weigh more."""
    shape, inside = VLLM_SHAPE if in_vllm else SHAPE, ("graft", "_spread", "apply")
    launched = (
        one
        for one in operations
        if one.kind is Kind.LAUNCH and not set(inside).isdisjoint(one.functions)
    )
    own = 2 * shape["num_key_value_heads"] * shape["head_dim"] * torch.bfloat16.itemsize
    return (
        4.096
        * sum(one.nbytes for one in launched)
        / (own * layers * round(tokens * KNOWN) * prompts)
    )


def main(
    host: Annotated[HostName, typer.Option(help="What runs the recoveries.")] = HostName.NATIVE,
    policies: Annotated[
        str, typer.Option(help="Policies, or flows with --decode, by semicolons.")
    ] = "",
    decode: Annotated[
        bool, typer.Option("--decode", help="Count decode steps of the native host.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 2048,
    prompts: Annotated[int, typer.Option(help="In one pass; of the native host.")] = 1,
    layers: Annotated[
        int, typer.Option(help="Of the model; twice as many tell what a layer adds.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count, and print a row for each policy."""
    in_vllm = host is HostName.VLLM
    if in_vllm and (prompts != 1 or decode):
        raise typer.BadParameter(
            "--host vllm counts recoveries of one prompt: no --prompts, no --decode"
        )
    names = (
        policies.split(";")
        if policies
        else DECODED
        if decode
        else VLLM_POLICIES
        if in_vllm
        else POLICIES
    )
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("counting"):
        found = []
        for number in (layers, 2 * layers):
            model = Path(folder) / str(number)
            make_model(
                model, number, MAX_LENGTH, VLLM_SHAPE if in_vllm else SHAPE, dtype="bfloat16"
            )
            if in_vllm:
                found.append(counted_in_vllm(model, names, tokens))
            else:
                found.append((counted_steps if decode else counted)(model, names, tokens, prompts))
    few, many = found
    rows = {
        name: {
            **{kind.value: count_of(few[name], kind) for kind in SHOWN},
            "launches a layer": per_layer(few[name], many[name], Kind.LAUNCH, layers),
            "waits a layer": per_layer(few[name], many[name], Kind.WAIT, layers),
            "uploads that wait a layer": per_layer(
                few[name], many[name], Kind.WAITING_UPLOAD, layers
            ),
            "host operations a layer": per_layer(few[name], many[name], Kind.HOST, layers),
            "waits in recover": count_of(few[name], Kind.WAIT, "recover"),
            "KB a graft and layer": moved(few[name], in_vllm, layers, tokens, prompts),
        }
        for name in names
    }
    if as_json:
        settings = {
            "host": host,
            "tokens": tokens,
            "prompts": prompts,
            "layers": layers,
            "known": KNOWN,
        }
        kernels = {
            name: Counter(one.name for one in few[name] if one.kind is Kind.LAUNCH)
            for name in names
        }
        print(json.dumps({"settings": settings, "policies": rows, "kernels": kernels}))
        return
    table = markdown_table(["policy", *rows[names[0]]], words=["policy"])
    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()),
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
