"""LoRA adapters: what tells one from others, and which of them our own passes through the model run
under.

vLLM maps every row of a step to an adapter, and runs us between the step's forward pass and its
logits. So we map the rows of our passes, and then give back vLLM's mapping and the slots that its
adapters had."""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from msgspec.structs import replace
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest

FILES = "adapter_*"  # what vLLM reads of an adapter's directory: its configuration and its weights


@dataclass(frozen=True)
class Adapter:
    """An adapter as a request names it, with the digest of the weights that it means."""

    request: LoRARequest
    digest: str


def adapter_digest(request: LoRARequest) -> str | None:
    """What tells an adapter's weights from others', whatever their name: SHA-256 over the files
    that vLLM loads, as they are now. None if they are not on this machine."""
    try:
        directory = _directory(request.lora_path)
        stats = [(path.name, path.stat()) for path in sorted(directory.glob(FILES))]
        stamps = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
        # of experts; not known to all versions
        layout = "3d" if getattr(request, "is_3d_lora_weight", False) else ""
        return _digest(directory, stamps) + layout if stamps else None
    except OSError:
        return None


def _directory(path: str) -> Path:
    """Where vLLM finds it, without asking the network; OSError if it is not here."""
    local = Path(path).expanduser()
    if local.is_absolute() or local.exists():
        return local.absolute()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(path) from error


@lru_cache(1024)
def _digest(directory: Path, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    """Of these files; they are read again when their sizes, times or inodes have changed."""
    found = hashlib.sha256()
    for name, size, *_ in stamps:
        found.update(f"{len(name)} {name} {size} ".encode())
        with (directory / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


class RunnerAdapters:
    """The adapters of a model runner. Without LoRA it does nothing.

    Args:
        runner: vLLM's model runner, V1 or V2; methods of its adapter manager are replaced on this
            instance.
    """

    def __init__(self, runner: Any) -> None:
        self._manager = manager = (
            runner.lora_manager if runner.vllm_config.lora_config is not None else None
        )
        self._loaded: dict[int, str] = {}  # digests by vLLM's ids
        self._untold: dict[int, str] = {}
        self._wanted: Adapter | None = None
        self._num_rows: int | None = None  # that are mapped to it
        self._theirs: tuple[Any, ...] = ()  # what vLLM has set for the step that is under way
        self._is_theirs = True  # whether that stands
        if manager is not None:
            self._load, manager._load_adapter = manager._load_adapter, self._note_load
            self._set, manager.set_active_adapters = manager.set_active_adapters, self._note_step
            self._remove_all, manager.remove_all_adapters = (
                manager.remove_all_adapters,
                self._note_removal,
            )

    def use(self, adapter: Adapter | None) -> None:
        """What the next passes run under; None: the model itself. To be said again whenever vLLM
        has run between."""
        self._wanted, self._num_rows = adapter, None

    def map_rows(self, num_rows: int) -> None:
        """A pass of so many rows is about to begin: at most as many as vLLM computes in a step.

        Raises:
            RuntimeError: the adapter does not have the weights any more that it was said to have.
        """
        if self._manager is None or num_rows in (0, self._num_rows):
            return
        self._is_theirs = False
        if self._wanted is None:
            self._map(set(), 0, num_rows)
        else:
            request, digest = self._wanted.request, self._wanted.digest
            number = request.lora_int_id
            anew = request.load_inplace and self._loaded.get(number) != digest
            self._map({replace(request, load_inplace=anew)}, number, num_rows)
            if self._loaded.get(number) != digest:
                raise RuntimeError(
                    f"adapter {request.lora_name!r} has other weights than when this was planned"
                )
        self._num_rows = num_rows

    def give_back(self) -> None:
        """Let vLLM's step go on with its own adapters."""
        if self._theirs and not self._is_theirs:
            active, mapping = self._theirs
            self._set({replace(request, load_inplace=False) for request in active}, mapping)
        self._theirs, self._is_theirs = (), True

    def take_loaded(self) -> dict[int, str]:
        """Digests of what has been loaded since the last call, by vLLM's ids."""
        untold, self._untold = self._untold, {}
        return untold

    def _map(self, active: set[LoRARequest], number: int, num_rows: int) -> None:
        rows = (number,) * num_rows
        self._set(active, LoRAMapping(rows, rows, is_prefill=True))

    def _note_load(self, request: LoRARequest) -> Any:
        """As vLLM's own, which it calls. Weights that change meanwhile are like no others."""
        before = adapter_digest(request)
        found = self._load(request)
        after = adapter_digest(request)
        digest = after if after is not None and before in (None, after) else os.urandom(32).hex()
        if self._loaded.get(request.lora_int_id) != digest:
            self._loaded[request.lora_int_id] = self._untold[request.lora_int_id] = digest
        return found

    def _note_step(self, *given: Any) -> None:
        """As vLLM's own, which it calls."""
        self._theirs = given
        self._set(*given)

    def _note_removal(self) -> None:
        """Likewise: there is nothing to give back."""
        self._theirs = ()
        self._remove_all()
