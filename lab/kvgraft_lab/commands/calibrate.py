"""The command that chooses a policy for a model and the user's own texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvgraft.cli.options import (
    KV_GIB,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvOption,
    ModelArgument,
    app,
    check_output,
    console,
    find,
    load,
    progress_console,
    show,
)
from kvgraft.cli.progress import progress_bar
from kvgraft_lab.commands.names import split_names
from kvgraft_lab.testbed import MODEL_DIR, is_testbed

# bundled texts of each task
BUNDLED_TEXTS = 16


@app.command()
def calibrate(
    model: ModelArgument = MODEL_DIR,
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Files of the text that requests will hold (repeatable)."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded requests, as for `analyze`, whose messages are the text."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Where the profile goes.", show_default="MODEL/policy.json"
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Directory of the answers; one that holds a part is continued.")
    ] = Path("calibration"),
    policies: Annotated[
        str | None,
        typer.Option(
            help="Candidates, by semicolons.",
            show_default="twelve, and redknot if the model has a head map",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Of full's FLOPs, that the policy may take.")
    ] = 0.25,
    items: Annotated[int, typer.Option(help="Prompts that choose, and as many that check.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1536,
    segments: Annotated[int, typer.Option(help="Known texts in a prompt.")] = 5,
    flows: Annotated[
        str | None,
        typer.Option(
            help="Flows to try with the chosen policy, by semicolons; `dense` for none.",
            show_default="quest, block_topk",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    as_json: JsonOption = False,
) -> None:
    """Which policy suits a model and your texts: a profile that `serve` and Engine take by
    themselves."""
    model = find(model)
    from kvgraft.flows import DENSE
    from kvgraft.policies.profile import POLICY_FILE
    from kvgraft_lab.evaluate import calibration

    out = model / POLICY_FILE if out is None else out
    check_output(out)
    testbed = is_testbed(model)
    found, described = _texts(texts or [], trace or [], bundled=testbed)
    named, tried = split_names(policies or "", ";"), list(calibration.FLOWS)
    if flows is not None:
        tried = [flow for flow in split_names(flows, ";") if flow != DENSE]
    # bad values are reported before the model loads
    settings = calibration.CalibrationSettings(
        found, described, named or calibration.CANDIDATES, items, length, segments, budget, seed,
        tried,
    )  # fmt: skip
    engine = load(
        model,
        dtype=dtype,
        device=device,
        kv_gib=kv_gib,
        policies=settings.policies,
        match="similar",
    )
    if not named:
        settings = replace(settings, policies=calibration.candidates(engine))
    with progress_bar(progress_console, "calibrating") as on_progress:
        profile = calibration.calibrate(engine, settings, results, on_progress, testbed=testbed)
    show(profile, calibration.render(profile), as_json=as_json)
    profile.save(out)
    from kvgraft_lab.evaluate.plots import write_calibration  # matplotlib takes a second to load

    picture = write_calibration(profile, results / "calibration.png")
    if not as_json:
        console.print(f"[dim]{out}, {picture}[/dim]", soft_wrap=True)


def _texts(
    files: Sequence[Path], trace: Sequence[Path], *, bundled: bool
) -> tuple[dict[str, str], str]:
    """Return texts by name, and their description. By default they are texts that the bundled
    model, or any other, can read.
    """
    if files and trace:
        raise ValueError("give either --texts or --trace, not both")
    if trace:
        from kvgraft_lab.traffic.texts import read_messages

        return read_messages(trace), f"messages of {', '.join(path.name for path in trace)}"
    if files:
        named = ", ".join(path.name for path in files[:3]) + (
            f" and {len(files) - 3} more" if len(files) > 3 else ""
        )
        return {str(path): path.read_text(encoding="utf-8") for path in files}, named
    if bundled:
        from kvgraft_lab.evaluate.tasks import GENERATED, Shape

        items = GENERATED["multihop"].items(0, BUNDLED_TEXTS, Shape())
        return {
            str(n): " ".join(item.phase_2[0].segments[1:-1]) for n, item in enumerate(items)
        }, "generated texts"
    from kvgraft_lab.evaluate.tasks.packages import read_documentation

    sentences = {
        one.name: " ".join(sentence for _, sentence in one.sentences)
        for one in read_documentation()
    }
    return sentences, "documentation of installed packages"
