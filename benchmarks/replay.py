"""Whole sessions against plain vLLM and ours: does reuse last from turn to turn, and what does it
gain a session?

    python benchmarks/replay.py  # generated sessions (see sessions.py), random model
    python benchmarks/replay.py --kind mixed --model DIR --sessions 16 --plot replay.png
    # recorded ones, up to 64K tokens: counts tokens, not time
    python benchmarks/replay.py --trace FILE_OR_DIR --tiny
    # does one that only discovers foretell what a live one does?
    python benchmarks/replay.py --shadow

Both servers get the same requests, in turn: one request each, or with several sessions at once
(--concurrency, --rate, --batch) a batch of sessions each. Without `--model` the model is random and
knows no words: its prompts are hashed pieces of the text, about four characters each."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from replay_tables import (
    Prediction,
    all_turns,
    as_json,
    draw,
    endings,
    kinds_of,
    latencies_of,
    lines_of_replay,
    summaries,
    turn_rows,
    turns_of,
)  # fmt: skip
from replay_traffic import ANSWERS, Replayed, Script, Sending, check_bodies, replay
from scenarios import Pair, make_random_model
from servers import THREADS, ServerOptions, start
from sessions import KINDS, SessionShape, bundled_words, make_sessions
from tables import configuration, line_of_settings
from traces import Session, hashed, read_traces, tokenised
from ttft import SHAPE

CONTEXT = 65536  # of random models
LAYERS = 12
TINY_LAYERS = 2
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32,
}  # fmt: skip
OURS = ["--kvgraft-continuation"]
SHADOW = ("--kvgraft-mode", "shadow")
KIND, SCALE = "reordered", 0.1
errors = Console(stderr=True)


def main(
    kind: Annotated[
        str, typer.Option(help=f"Generated: {', '.join(KINDS)}.", show_default=KIND)
    ] = "",
    trace: Annotated[
        list[Path] | None, typer.Option(help="Recorded JSONL, or a folder of it (repeatable).")
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=1, help="Number of sessions, of a trace the first ones.")
    ] = 8,
    turns: Annotated[
        int, typer.Option(help="Of a generated session.", show_default=str(SessionShape.turns))
    ] = 0,
    scale: Annotated[
        float, typer.Option(help="Of the sizes of generated ones.", show_default=str(SCALE))
    ] = 0.0,
    model: Annotated[
        Path | None, typer.Option(help="Model directory.", show_default="a random model")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A random model that is fast and small.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send messages, not tokens; needs --model.")
    ] = False,
    answers: Annotated[
        str, typer.Option(help=f"In later requests: {', '.join(ANSWERS)}.")
    ] = "recorded",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 16,
    max_model_len: Annotated[
        int, typer.Option(help="Sessions are cut there.", show_default="the model's")
    ] = 0,
    concurrency: Annotated[
        int, typer.Option(help="Sessions at once; 0: one, or all that arrive.")
    ] = 0,
    rate: Annotated[float, typer.Option(help="Poisson arrivals of sessions per second.")] = 0.0,
    batch: Annotated[
        int, typer.Option(help="Sessions before the other's turn; 0: those at once, or a request.")
    ] = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="One namespace for all sessions.")
    ] = False,
    ours: Annotated[list[str], typer.Option(help="A flag of our server (repeatable).")] = OURS,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Instead of plain vLLM: ours that only discovers.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the servers.")] = "float32",
    kv_gib: Annotated[int, typer.Option(min=1, help="Memory of each server's KV pool.")] = 2,
    threads: Annotated[
        int, typer.Option(help="CPU cores that each server's model runs on.")
    ] = THREADS,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replay sessions against plain vLLM and ours."""
    _check(model, tiny=tiny, chat=chat, answers=answers)
    if trace:
        _refuse("with --trace", kind=kind, turns=turns, scale=scale)
    console = Console(quiet=json_out)
    with _usage_errors():
        limit = _limit(model, max_model_len)
        sending = Sending(
            max_tokens, limit, concurrency, rate, batch, shared, answers == "own", chat, seed
        )
        wanted = (kind or KIND, turns or SessionShape.turns, scale or SCALE)
        traffic = _recorded(trace, sessions) if trace else _generated(*wanted, sessions, seed)
        check_bodies(traffic, sending)
    told = "{}, {} turns, scale {}".format(*wanted) if not trace else ", ".join(map(str, trace))
    with _model(model, tiny) as folder:
        scripts = _scripts(traffic, folder, known=model is not None)
        if not sending.own_answers:
            longest = max(length for script in scripts for length in script.lengths)
            sending = replace(sending, max_model_len=min(limit, longest + max_tokens))
        settings = ServerOptions(
            folder, dtype, sending.max_model_len, threads=threads, kv_gib=kv_gib
        )
        name = str(model or ("random, tiny" if tiny else f"random, {LAYERS} layers"))
        head = configuration(settings, name) | {
            "traffic": told,
            "sessions": len(scripts),
            "our flags": " ".join(ours),
        }
        console.print(line_of_settings(head), soft_wrap=True)
        replayed = _serve(
            settings, [*ours, *SHADOW] if shadow else ["--no-kvgraft"], ours, scripts, sending
        )
    _show(replayed, sending, console, plot)
    if shadow:
        console.print(Prediction.of(replayed).line, soft_wrap=True)
    if json_out:
        told_all = as_json(replayed, sending.own_answers)
        predicted = {"prediction": asdict(Prediction.of(replayed))} if shadow else {}
        print(
            json.dumps({"configuration": head, "sending": asdict(sending)} | told_all | predicted)
        )


def _serve(
    settings: ServerOptions,
    first: Sequence[str],
    second: Sequence[str],
    scripts: Sequence[Script],
    sending: Sending,
) -> list[Replayed]:
    async def run(pair_of: Any) -> list[Replayed]:
        async with pair_of as pair:
            with progress_bar(errors, "sessions") as on_progress:
                return await replay(pair, scripts, sending, on_progress)

    with start(settings, *first) as plain, start(settings, *second) as ours:
        return asyncio.run(run(Pair.of(plain, ours, None)))


def _show(
    replayed: Sequence[Replayed], sending: Sending, console: Console, plot: Path | None
) -> None:
    rows = turn_rows(replayed)
    if not rows:
        errors.print("no request was answered by both servers:", *endings(replayed), sep="\n")
        raise typer.Exit(1)
    total = all_turns(replayed)
    console.print(
        latencies_of(summaries(replayed)), kinds_of(rows, total), turns_of(rows, total), sep="\n"
    )
    for line in lines_of_replay(replayed, sending.own_answers):
        console.print(line, soft_wrap=True)
    if plot:
        draw(rows, plot)
        errors.print(f"wrote {plot}")


def _recorded(paths: Sequence[Path], count: int) -> list[Session]:
    found, skipped = read_traces(paths, count)
    if skipped:
        errors.print(f"{skipped} lines that are no requests (responses, say) were passed over")
    return found


def _generated(kind: str, turns: int, scale: float, count: int, seed: int) -> list[Session]:
    shape = SessionShape(
        turns=turns, corpus=max(SessionShape.corpus, 2 * turns * SessionShape.documents)
    )
    return make_sessions(kind, shape.scaled(scale), count, bundled_words(), seed)


def _scripts(sessions: Sequence[Session], folder: Path, *, known: bool) -> list[Script]:
    """What sessions send to a model in `folder`, which knows words or is random."""
    encode = tokenised(folder) if known else hashed(_config(folder)["vocab_size"])
    with _usage_errors():
        return [Script(session, encode) for session in sessions]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What the caller's arguments or files made impossible ends as such."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _model(model: Path | None, tiny: bool) -> Iterator[Path]:
    """The model given, or a random one that is gone afterwards."""
    if model:
        yield model
        return
    with TemporaryDirectory() as folder:
        layers, shape = (TINY_LAYERS, TINY) if tiny else (LAYERS, SHAPE)
        make_random_model(Path(folder), layers, CONTEXT, shape)
        yield Path(folder)


def _limit(model: Path | None, wanted: int) -> int:
    """Tokens of the longest sequence.

    Raises:
        ValueError: more are wanted than the model has positions.
    """
    positions = _config(model)["max_position_embeddings"] if model else CONTEXT
    if wanted > positions:
        raise ValueError(
            f"--max-model-len must be at most {positions}, the positions of the model, got {wanted}"
        )
    return wanted or positions


def _config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def _check(model: Path | None, *, tiny: bool, chat: bool, answers: str) -> None:
    if model and tiny:
        raise typer.BadParameter("--tiny makes a model of its own: leave out --model")
    if chat and not model:
        raise typer.BadParameter("--chat needs --model: a random model has no chat template")
    if answers not in ANSWERS:
        raise typer.BadParameter(f"--answers must be one of {', '.join(ANSWERS)}, got {answers!r}")


def _refuse(where: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(f"--{name} has no meaning {where}")


if __name__ == "__main__":
    typer.run(main)
