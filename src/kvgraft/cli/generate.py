"""Command that answers one prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraft.cli.options import (
    KV_GIB,
    DeviceOption,
    DtypeOption,
    HeadMapOption,
    HeadPagingOption,
    JsonOption,
    KvOption,
    ModelOption,
    app,
    console,
    load,
    print_json,
    progress_console,
)
from kvgraft.cli.progress import progress_bar
from kvgraft.core.options import StoreFields
from kvgraft.core.prompt import mark, parse_markers, render_chat
from kvgraft.models import BUNDLED
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft.setting_schema import declarations

if TYPE_CHECKING:
    from kvgraft.engine.engine import Engine
    from kvgraft.engine.request import Request, Result
    from kvgraft.store import StoreOptions


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text; <|reuse|> ... <|/reuse|> marks segments.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this file instead.")
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "Text files, read one by one first; those not in the prompt are put before it "
                "(repeatable)."
            )
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")
    ] = False,
    model: ModelOption = Path(BUNDLED),
    policy: Annotated[
        str | None,
        typer.Option(
            help="spread, sparsex:recompute_share=0.2,boundary_layers=1, full, ...",
            show_default=f"of the model's profile, or {DEFAULT_POLICY}",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string (repeatable).")] = None,
    namespace: Annotated[str, typer.Option(help="Isolation key of cached content.")] = "default",
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    head_map: HeadMapOption = None,
    head_paging: HeadPagingOption = False,
    store: Annotated[
        Path | None, typer.Option(help="Directory where later calls find what this one reads.")
    ] = None,
    store_gib: Annotated[
        float | None,
        typer.Option(
            help="Size of it at most, GiB.",
            show_default=declarations(StoreFields)["disk_gib"].shown,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt about texts that the model has read before, each on its own; prints the
    text and a report."""
    from kvgraft.engine.request import Request
    from kvgraft.engine.sampling import SamplingParams
    from kvgraft.policies import parse_policy

    if (prompt is None) == (file is None):
        raise ValueError("give either a prompt or --file")
    policies = () if policy is None else (str(parse_policy(policy)),)
    text = prompt if prompt is not None else _read_text(file)
    sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()))
    known = [_read_document(path) for path in read or []]
    text = _behind(known, text)
    settings = {
        "head_map": head_map,
        "head_paging": head_paging,
        "store": _store_options(store, store_gib),
    }
    with load(
        model, dtype=dtype, device=device, kv_gib=kv_gib, policies=policies, **settings
    ) as engine:
        if chat:
            text = render_chat(engine.tokenizer, [{"role": "user", "content": text}])
        num_restored = _read_first(engine, known, namespace)
        final = _answer(
            engine, Request(parse_markers(text), policy, sampling, namespace), echo=not as_json
        )
    num_restored += final.report.counts["restored_blocks"]
    if as_json:
        restored = {} if store is None else {"restored_blocks": num_restored}
        print_json(
            {"text": final.text, "finish_reason": final.finish_reason, "report": final.report}
            | restored
        )
    else:
        print()
        _print_report(final, None if store is None else num_restored)


def _read_text(path: Path | None) -> str:
    if path is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    return path.read_text(encoding="utf-8")


def _read_document(path: Path) -> str:
    if not (text := _read_text(path)).strip():
        raise ValueError(f"{path} has no text")
    return text


def _behind(documents: Sequence[str], prompt: str) -> str:
    """Return the prompt after the documents that it does not contain; each document is a
    segment.
    """
    missing = [document for document in documents if document.strip() not in prompt]
    return "".join(f"{mark(document)}\n" for document in missing) + prompt


def _store_options(directory: Path | None, size_gib: float | None) -> "StoreOptions | None":
    from kvgraft.store import StoreOptions

    if directory is None and size_gib is not None:
        raise ValueError(f"--store-gib {size_gib} is the size of --store: give that, too")
    if directory is None:
        return None
    return (
        StoreOptions(directory) if size_gib is None else StoreOptions(directory, disk_gib=size_gib)
    )


def _read_first(engine: "Engine", texts: list[str], namespace: str) -> int:
    """Prefill texts, and return the number of their blocks that came from the store."""
    from kvgraft.engine.request import Request
    from kvgraft.engine.sampling import SamplingParams

    num_restored, sampling = 0, SamplingParams(max_tokens=1)
    with progress_bar(progress_console, "reading") as on_progress:
        for number, text in enumerate(texts, 1):
            [result] = engine.generate([Request(parse_markers(text), "full", sampling, namespace)])
            num_restored += result.report.counts["restored_blocks"]
            on_progress(number, len(texts))
    return num_restored


def _answer(engine: "Engine", request: "Request", *, echo: bool) -> "Result":
    """Answer a request. With `echo`, write the text to stdout as it is generated."""
    final: Result | None = None
    for event in engine.stream([request]):
        if echo:
            print(event.text, end="", flush=True)
        final = event.result or final
    if final is None or final.error:
        raise ValueError(final.error if final and final.error else "the engine gave no answer")
    return final


def _print_report(result: "Result", num_restored: int | None) -> None:
    """Print a report in one line, with the blocks from a store if there is one."""
    report = result.report
    stages = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in report.stages.items())
    console.print(
        f"[dim]{report.recovered_by or report.policy}: {report.prompt_tokens} prompt tokens = "
        f"{report.prefix_tokens} prefix + "
        f"{report.continued_tokens} continued + "
        f"{report.grafted_tokens} grafted ({report.recomputed_tokens} recomputed) + "
        f"{report.fresh_tokens} fresh; "
        f"first token after {1e3 * report.ttft_s:.1f} ms ({stages})"
        + ("" if num_restored is None else f"; {num_restored} blocks restored")
        + (f"; fell back to full: {report.fallback}" if report.fallback else "")
        + "[/dim]"
    )
