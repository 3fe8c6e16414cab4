"""Commands that study models and methods."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvgraft.cli.options import (
    KV_GIB,
    ChatOption,
    DeviceOption,
    DtypeOption,
    HeadMapOption,
    HeadPagingOption,
    JsonOption,
    KvOption,
    ModelArgument,
    ModelOption,
    OrderNoiseOption,
    ScoresOnlyOption,
    app,
    check_output,
    console,
    find,
    load,
    print_json,
    progress_console,
    show,
)
from kvgraft.cli.progress import progress_bar
from kvgraft.kv.profiles import LAYERS_FILE
from kvgraft.methods import require_share
from kvgraft_lab.commands.names import split_names
from kvgraft_lab.evaluate.tasks import PATTERNS, SPLITS, find_suites
from kvgraft_lab.testbed import MODEL_DIR, is_testbed

# the engine's default
BLOCK_SIZE = 16


@app.command("eval")
def evaluate(
    suite: Annotated[
        str,
        typer.Option(
            help="By commas: all, ruler, ..., docs, alike, code, retrieval, edits, or files "
            "(.json, .jsonl)."
        ),
    ],
    policies: Annotated[
        str,
        typer.Option(
            help="Policies, by semicolons or, without options, by commas. `spread with quest` "
            "decodes under a flow."
        ),
    ] = ("full,naive,epic,cacheblend,prophet,sparsex,transitive,spread"),
    model: ModelOption = MODEL_DIR,
    host: Annotated[
        str, typer.Option(help="native, vllm (a server of its own), or the URL of a server.")
    ] = "native",
    full_host: Annotated[
        str | None,
        typer.Option(
            help="URL of another server that answers full and order noise.",
            show_default="the host",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory of the results; one that holds a part is continued.")
    ] = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, by commas.")] = "1024",
    segments: Annotated[int, typer.Option(help="Reused segments of a prompt.")] = 8,
    patterns: Annotated[
        str, typer.Option(help=f"Ways of reuse, by commas, of {', '.join(PATTERNS)}.")
    ] = "all",
    items: Annotated[int, typer.Option(help="Texts a task, each with up to four questions.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the texts and questions.")] = 1000,
    split: Annotated[
        str, typer.Option(help=f"Of real text (docs, files): {', '.join(SPLITS)}.")
    ] = "all",
    chat: ChatOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    head_map: HeadMapOption = None,
    head_paging: HeadPagingOption = False,
    order_noise: OrderNoiseOption = False,
    scores_only: ScoresOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quality and speed of policies on task suites: tables, plots, one line of JSON for each
    answer."""
    from kvgraft_lab.evaluate import plots, results, runner  # matplotlib takes a second to load
    from kvgraft_lab.evaluate.hosts import open_host

    settings = runner.EvalSettings(
        find_suites(suite, split),
        tuple(split_names(policies, ";" if ";" in policies or ":" in policies else ",")),
        tuple(_parse_lengths(lengths)),
        segments,
        PATTERNS if patterns == "all" else tuple(split_names(patterns, ",")),
        items,
        seed,
        order_noise,
        chat,
    )
    model = find(model) if host in ("native", "vllm") else model
    engine: dict[str, Any] = {
        "device": device,
        "kv_gib": kv_gib,
        "head_map": head_map,
        "head_paging": head_paging,
        "policies": settings.policies,
    }
    with (
        progress_console.status(f"starting {host}"),
        open_host(
            host, model, dtype=dtype, distances=not scores_only, full=full_host, **engine
        ) as opened,
        progress_bar(progress_console, "evaluating") as on_progress,
    ):
        rows = runner.run(settings, opened, out, on_progress)
    results.write_tables(rows, out, f"kvgraft {' '.join(sys.argv[1:])}")
    pictures = plots.write_plots(rows, out)
    if as_json:
        print_json({name: results.summarise(rows, name) for name in results.GROUPINGS})
    else:
        console.print(results.render(rows))
        console.print(
            f"[dim]{out}: {runner.ROWS}, tables.md, "
            f"{', '.join(path.name for path in pictures)}[/dim]",
            soft_wrap=True,
        )


@app.command()
def layers(
    model: ModelOption = MODEL_DIR,
    texts: Annotated[int, typer.Option(help="Texts with a needle.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Directory for pictures of the first text.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first text.")] = 0,
    english: Annotated[
        bool | None,
        typer.Option(help="Texts in English.", show_default="for any model but the bundled one"),
    ] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    as_json: JsonOption = False,
) -> None:
    """Which layer of a model finds a needle, by KV deviation and by attention; and so the probe of
    `transitive`."""
    from kvgraft_lab.evaluate import layers as finding
    from kvgraft_lab.evaluate.needles import english_needle, fact_needle

    if texts < 1:
        raise ValueError(f"texts must be at least 1, got {texts}")
    model = find(model)
    if english is None:
        english = not is_testbed(model)
    make = english_needle if english else fact_needle
    engine = load(model, dtype=dtype, device=device, kv_gib=kv_gib)
    with progress_bar(progress_console, "reading") as on_progress:
        survey = finding.survey(engine, make, range(seed, seed + texts), on_progress)
    if out is not None:
        finding.draw(engine, make(seed), out)
    if as_json:
        shares = [
            {"signal": signal, "layout": layout, "found": shares.tolist()}
            for (signal, layout), shares in survey.found.items()
        ]
        print_json({"texts": texts, "probe": survey.probe, "layers": shares})
    else:
        console.print(finding.render(survey))


@app.command("profile-heads")
def profile_heads(
    model: ModelArgument = MODEL_DIR,
    out: Annotated[
        Path | None, typer.Option(help="Where the map goes.", show_default="MODEL/heads.json")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Of the KV heads, that keep everything.", show_default="0.15"),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Instead: how much of what --by measures makes a head keep all."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="effect: how much the next token changes if the head sees sinks and window "
            "only. far-mass: its attention outside them (faster, and often misleading)."
        ),
    ] = "effect",
    window: Annotated[int, typer.Option(help="Last tokens that local heads see.")] = 256,
    sinks: Annotated[int, typer.Option(help="First tokens that local heads see.")] = 4,
    samples: Annotated[int, typer.Option(help="Texts, each behind two prefixes.")] = 24,
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 1024,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Ask how these files go on, instead of the questions (repeatable)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the heads: layers by heads, as PNG.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Which KV heads of a model need the whole context: a map for `redknot` and for
    --head-paging."""
    from kvgraft.kv.heads import HEAD_MAP_FILE
    from kvgraft_lab.evaluate import heads

    if share is None and threshold is None:
        share = 0.15
    model = find(model)
    out = model / HEAD_MAP_FILE if out is None else out
    check_output(out)
    check_output(plot, "--plot")
    engine = load(model, dtype=dtype, device=device, kv_gib=0.01)
    if text:
        named = {str(path): path.read_text(encoding="utf-8") for path in text}
        chosen = heads.own_samples(engine, named, seed=seed, count=samples, length=length)
    else:
        draw = heads.testbed_samples if is_testbed(model) else heads.english_samples
        chosen = draw(engine, seed=seed, count=samples, length=length)
    with progress_bar(progress_console, "profiling") as on_progress:
        measure: Any = by
        profile = heads.profile(
            engine, chosen, sinks=sinks, window=window, share=share, threshold=threshold,
            by=measure,
            on_progress=on_progress,
        )  # fmt: skip
    show(profile, heads.render(profile), as_json=as_json)
    profile.head_map.save(out)
    if plot is not None:
        from kvgraft_lab.evaluate.plots import write_heads  # matplotlib takes a second to load

        write_heads(profile.head_map, plot)
    if not as_json:
        console.print(f"[dim]{out}{f', {plot}' if plot else ''}[/dim]", soft_wrap=True)


@app.command("profile-layers")
def profile_layers(
    model: ModelArgument = MODEL_DIR,
    out: Annotated[
        Path | None, typer.Option(help="Where the profile goes.", show_default="MODEL/layers.json")
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            help="Share of the best layer's score that makes a layer of the upper half stable."
        ),
    ] = 0.5,
    texts: Annotated[int, typer.Option(help="Texts of each suite or file.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 1024,
    block: Annotated[
        int, typer.Option(help="Tokens of a block: of a text at least 14 are wanted.")
    ] = 16,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Read these files instead of generated texts (repeatable)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the scores of all layers, as PNG.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Which layers of a model agree on what is important in a text: N* of `samkv`."""
    from kvgraft_lab.evaluate import layer_profile

    model = find(model)
    out = model / LAYERS_FILE if out is None else out
    check_output(out)
    check_output(plot, "--plot")
    engine = load(model, dtype=dtype, device=device, kv_gib=0.01)
    if text:
        named = {path.name: path.read_text(encoding="utf-8") for path in text}
        chosen = layer_profile.user_texts(engine, named, count=texts, length=length, block=block)
    else:
        chosen = layer_profile.generated_texts(
            engine, seed=seed, count=texts, length=length, block=block,
            testbed=is_testbed(model),
        )  # fmt: skip
    with progress_bar(progress_console, "profiling") as on_progress:
        survey = layer_profile.survey(engine, chosen, block, on_progress)
    profiled = layer_profile.profile(engine.config.identity, survey, threshold)
    scores = {name: scores.tolist() for name, scores in survey.items()}
    show(
        {"profile": profiled, "texts": scores},
        layer_profile.render(survey, profiled),
        as_json=as_json,
    )
    profiled.save(out)
    if plot is not None:
        from kvgraft_lab.evaluate.plots import (
            write_layer_profile,  # matplotlib takes a second to load
        )

        write_layer_profile(survey, profiled.stable, plot)
    if not as_json:
        console.print(f"[dim]{out}{f', {plot}' if plot else ''}[/dim]", soft_wrap=True)


@app.command("profile-costs")
def profile_costs(
    model: ModelArgument = MODEL_DIR,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the costs go.")] = Path(
        "costs.json"
    ),
    recomputed_share: Annotated[
        float, typer.Option(help="Of grafted tokens, that is computed again: for the table only.")
    ] = 0.15,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """How long this machine takes to compute and to graft: a file for Engine(costs=...) and for
    `analyze --costs`."""
    check_output(out)
    require_share("--recomputed-share", recomputed_share)
    from kvgraft.prefill.cost_calibration import sizes
    from kvgraft_lab.evaluate import cost_profile

    pages = -(-sizes(device != "cpu")[-1] // BLOCK_SIZE)
    engine = load(model, dtype=dtype, device=device, block_size=BLOCK_SIZE, num_pages=pages)
    with progress_console.status("measuring"):
        found = cost_profile.profile(engine, recomputed_share)
    show(found, cost_profile.render(found), as_json=as_json)
    found.costs.save(out)
    if not as_json:
        console.print(f"[dim]{out}[/dim]", soft_wrap=True)


def _parse_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in split_names(text, ",")]
    except ValueError:
        raise ValueError(
            f"lengths must be numbers of tokens, separated by commas, got {text!r}"
        ) from None
