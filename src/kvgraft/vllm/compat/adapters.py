"""LoRA adapters: digests of their weights, and adapters in our own passes through the model.

vLLM maps every row of a step to an adapter. It runs our passes between the step's forward pass and
its logits. So we map the rows of our passes, and then restore vLLM's mapping and adapter slots.
"""

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

# files that vLLM reads in an adapter's directory: configuration and weights
FILES = "adapter_*"


@dataclass(frozen=True)
class Adapter:
    """Adapter that a request names, with the digest of the weights that it expects."""

    request: LoRARequest
    digest: str


def adapter_digest(request: LoRARequest) -> str | None:
    """Return a SHA-256 over the adapter's files that vLLM loads, regardless of its name.

    Returns:
        None if the files are not on this machine.
    """
    try:
        directory = _directory(request.lora_path)
        stats = [(path.name, path.stat()) for path in sorted(directory.glob(FILES))]
        stamps = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
        # Layout of expert weights; not all vLLM versions have it.
        layout = "3d" if getattr(request, "is_3d_lora_weight", False) else ""
        return _digest(directory, stamps) + layout if stamps else None
    except OSError:
        return None


def _directory(path: str) -> Path:
    """Return the directory in which vLLM finds an adapter, without network access.

    Raises:
        OSError: the adapter is not on this machine.
    """
    local = Path(path).expanduser()
    if local.is_absolute() or local.exists():
        return local.absolute()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(path) from error


@lru_cache(1024)
def _digest(directory: Path, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    """Return the digest of these files.

    They are read again when size, time or inode has changed.
    """
    found = hashlib.sha256()
    for name, size, *_ in stamps:
        found.update(f"{len(name)} {name} {size} ".encode())
        with (directory / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


class RunnerAdapters:
    """Adapters of a model runner. Without LoRA it does nothing.

    Args:
        runner: vLLM's model runner, V1 or V2. Methods of its adapter manager are replaced on this
            instance.
    """

    def __init__(self, runner: Any) -> None:
        self._manager = manager = (
            runner.lora_manager if runner.vllm_config.lora_config is not None else None
        )

        # digests by vLLM's adapter ids
        self._loaded: dict[int, str] = {}
        self._untold: dict[int, str] = {}
        self._wanted: Adapter | None = None

        # rows mapped to `_wanted` at present
        self._num_rows: int | None = None

        # arguments of vLLM for the step under way
        self._theirs: tuple[Any, ...] = ()

        # True while vLLM's own mapping is active
        self._is_theirs = True

        if manager is not None:
            self._load, manager._load_adapter = manager._load_adapter, self._note_load
            self._set, manager.set_active_adapters = manager.set_active_adapters, self._note_step
            self._remove_all, manager.remove_all_adapters = (
                manager.remove_all_adapters,
                self._note_removal,
            )

    def use(self, adapter: Adapter | None) -> None:
        """Set the adapter of the next passes; None for the base model.

        Call this again after vLLM has run in between.
        """
        self._wanted, self._num_rows = adapter, None

    def map_rows(self, num_rows: int) -> None:
        """Map the rows of the next pass to the adapter.

        Args:
            num_rows: rows of the pass, at most those that vLLM computes in a step.

        Raises:
            RuntimeError: the adapter's weights are not those that the request expects.
        """
        if self._manager is None or num_rows in (0, self._num_rows):
            return

        self._is_theirs = False
        if self._wanted is None:
            self._map(set(), 0, num_rows)
        else:
            request, digest = self._wanted.request, self._wanted.digest
            number = request.lora_int_id
            reload = request.load_inplace and self._loaded.get(number) != digest
            self._map({replace(request, load_inplace=reload)}, number, num_rows)
            if self._loaded.get(number) != digest:
                raise RuntimeError(
                    f"adapter {request.lora_name!r} has other weights than when this was planned"
                )

        self._num_rows = num_rows

    def give_back(self) -> None:
        """Restore the adapters of vLLM's own step."""
        if self._theirs and not self._is_theirs:
            active, mapping = self._theirs
            self._set({replace(request, load_inplace=False) for request in active}, mapping)
        self._theirs, self._is_theirs = (), True

    def take_loaded(self) -> dict[int, str]:
        """Return the digests of adapters loaded since the last call, by vLLM's ids."""
        untold, self._untold = self._untold, {}
        return untold

    def _map(self, active: set[LoRARequest], number: int, num_rows: int) -> None:
        """Map `num_rows` rows to the adapter with this number."""
        rows = (number,) * num_rows
        self._set(active, LoRAMapping(rows, rows, is_prefill=True))

    def _note_load(self, request: LoRARequest) -> Any:
        """Load an adapter as vLLM does, and record its digest.

        Weights that change while they are loaded get a random digest.
        """
        before = adapter_digest(request)
        found = self._load(request)
        after = adapter_digest(request)
        digest = after if after is not None and before in (None, after) else os.urandom(32).hex()
        if self._loaded.get(request.lora_int_id) != digest:
            self._loaded[request.lora_int_id] = self._untold[request.lora_int_id] = digest
        return found

    def _note_step(self, *given: Any) -> None:
        """Set a step's adapters as vLLM does, and remember them."""
        self._theirs = given
        self._set(*given)

    def _note_removal(self) -> None:
        """Remove all adapters as vLLM does. Then there is nothing to restore."""
        self._theirs = ()
        self._remove_all()
