"""The command that trains the testbed model; a module of its own, since its processes import it."""

import os
import socket
from pathlib import Path
from typing import Annotated

import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvgraft.engine.config import load_config
from kvgraft.kv.heads import HEAD_MAP_FILE
from research.redknot.by_head import head_map
from research.testbed.export import export
from research.testbed.trainer import Job, train

MODEL = "model"  # directory of the exported model
# keep freed memory: a training step allocates and frees the same blocks as the one before
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}  # fmt: skip


def main(
    out: Annotated[
        Path, typer.Option(help="Directory of checkpoints, log and, in the end, the model.")
    ],
    seed: Annotated[int, typer.Option(help="Of the starting weights and of all texts.")] = 0,
    processes: Annotated[
        int, typer.Option(help="Of one thread each; more make larger batches.")
    ] = 2,
    by_head: Annotated[
        bool,
        typer.Option(
            "--by-head",
            help="Train the bundled model on, so that most KV heads need a window only.",
        ),
    ] = False,
    latent: Annotated[
        bool,
        typer.Option("--latent", help="Train the bundled model on with latent attention (MLA)."),
    ] = False,
    until: Annotated[
        int | None, typer.Option(help="Stop after this step; to go on, start it again.")
    ] = None,
) -> None:
    """Train the testbed model from scratch (about an hour on two cores), or a variant; started
    again, it goes on."""
    for name, value in (("processes", processes), ("until", until)):
        if value is not None and value < 1:
            raise typer.BadParameter(f"{name} must be at least 1, got {value}")
    if by_head and latent:
        raise typer.BadParameter("by head or latent: choose one")
    out.mkdir(parents=True, exist_ok=True)
    job = Job(out, seed, processes, until, by_head, latent)
    try:
        job.checkpoint()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        {**ALLOCATOR, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    )
    multiprocessing.spawn(_work, (job,), nprocs=processes)
    if job.last_step < job.num_steps:
        return
    export(out / f"model-{job.last_step}.safetensors", job.config, out / MODEL)
    if by_head:
        head_map(load_config(out / MODEL).identity).save(out / MODEL / HEAD_MAP_FILE)
    Console(stderr=True).print(f"{out / MODEL}: the model; {out / 'log.jsonl'}: how it learned")


def _work(rank: int, job: Job) -> None:
    if rank:
        train(job, rank)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=job.num_steps, said="")

        def show(step: int, said: dict[str, float]) -> None:
            progress.update(bar, completed=step)
            if said:
                progress.update(bar, said=f"length {said['length']:.0f}, loss {said['loss']:.2f}")

        train(job, rank, show)
