"""Private directory of the disk tier: its modes, its lock, and a safetensors file for each
chunk, read within a time limit."""

import fcntl
import math
import os
import secrets
import stat
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from blake3 import blake3
from safetensors import SafetensorError

from kvgraft.core.chunk import ITEM_BYTES, KEY_BYTES, ChunkRecord, Payload, specs

if TYPE_CHECKING:
    from torch import Tensor

CATALOGUE, LOCK = "catalogue.sqlite", "lock"
DIGEST_BYTES = 32
READ_S = 5.0  # longest time to read a chunk; meanwhile the engine's steps may wait
_METADATA = "kvgraft"  # metadata key of the record, as JSON
_SUFFIX, _TEMPORARY = ".safetensors", ".tmp"


class BadPayload(Exception):
    """A file that cannot be used: "missing", "damaged" (contents changed) or "foreign" (of another
    chunk)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def digest_of(data: bytes) -> bytes:
    """Return the BLAKE3 digest, DIGEST_BYTES bytes."""
    return blake3(data).digest()


def write_file(path: Path, data: bytes) -> None:
    """Write a new file that only this user may read, synced to disk. FileExistsError if it
    exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError if it is something else, since a FIFO could
    block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def make_private_file(path: Path) -> None:
    """Make a file with a mode that SQLite copies to its log files.

    An existing file is not opened. Closing it would release all locks of this process on it, so
    that another process could take SQLite's log.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def move_aside(path: Path) -> Path:
    """Rename a catalogue, with its SQLite log files, to the first free `catalogue.damaged-N`."""
    number = 1
    while (aside := path.with_name(f"catalogue.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        if (beside := path.with_name(path.name + suffix)).exists():
            beside.rename(aside.with_name(aside.name + suffix))
    return aside


def private_directory(path: Path) -> Path:
    """Return the directory, made if it does not exist.

    Raises:
        NotADirectoryError, PermissionError: it is something else, of another user, or open to
            others.
    """
    path = path.resolve()
    if not path.exists():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    return path


def check_private_directory(path: Path) -> None:
    """Raise the errors of `private_directory`, and PermissionError if the directory is not
    writable. Makes nothing."""
    try:
        path = path.resolve()
        nearest = next(place for place in (path, *path.parents) if place.exists())
        TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise PermissionError(f"{path}: nothing can be written there ({error.strerror})") from error
    if nearest == path:
        _check_private(path)


def _check_private(path: Path) -> None:
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    if status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, not to {os.getuid()}, who runs this"
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{path} is open to others (mode bits {mode:03o}): chmod 700 {path}")


class DirectoryLock:
    """Lock that tells whether this process alone uses a directory. Every user holds it, shared or
    exclusively."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_alone(self) -> bool:
        """Lock out others until `share`. If others use the directory, share it with them and return
        False."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            self.share()
            return False

    def share(self) -> None:
        """Let others use the directory. Waits for a process that locks out others."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the directory."""
        os.close(self._descriptor)


class TimedReads:
    """Reads with a time limit, for files on a disk that may stop answering.

    Each read has a thread, since no read can be cancelled. After a read that took too long, none
    begins until that one has ended.

    Args:
        limit_s: seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late: Future[Any] | None = None

    def run(self, read: Callable[[], Any]) -> Any:
        """Return the result of `read`, or raise its error.

        Raises:
            TimeoutError: it takes longer than the limit, or an earlier read still does.
        """
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier read has not ended")
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(read())
            except BaseException as error:  # raised again where it is waited for
                done.set_exception(error)

        Thread(target=work, name="kvgraft-read", daemon=True).start()
        self._late = done
        try:
            return done.result(self._limit_s)
        finally:
            if done.done():
                self._late = None


class PayloadFiles:
    """Files `xx/<key>.safetensors`, where xx is the first byte of the key. They are written under
    another name, then renamed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reads = TimedReads(READ_S)

    def path(self, key: bytes) -> Path:
        """Path of a chunk's payload."""
        return self.directory / key[:1].hex() / (key.hex() + _SUFFIX)

    def write(self, key: bytes, data: bytes) -> Path:
        """Write a payload under a temporary name, and return its path. After a failure the file is
        removed."""
        folder = self.path(key).parent
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / f"{key.hex()}.{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            write_file(temporary, data)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def publish(self, temporary: Path, key: bytes) -> None:
        """Rename a temporary file to its final name."""
        temporary.replace(self.path(key))

    def remove(self, key: bytes) -> None:
        """Remove the payload of a chunk, if there is one."""
        self.path(key).unlink(missing_ok=True)

    def read_in_time(
        self, record: ChunkRecord, num_bytes: int, digest: bytes
    ) -> dict[str, "Tensor"]:
        """Return what `read` does, or raise TimeoutError if it takes longer than `READ_S`."""
        stored: dict[str, Tensor] = self._reads.run(partial(self.read, record, num_bytes, digest))
        return stored

    def read(self, record: ChunkRecord, num_bytes: int, digest: bytes) -> dict[str, "Tensor"]:
        """Read and verify the stored payload of a chunk.

        Raises:
            BadPayload: the file does not exist, has another length or digest, or is of another
                record.
        """
        try:
            with open_regular(self.path(record.key)) as file:
                if os.fstat(file.fileno()).st_size != num_bytes:
                    raise BadPayload("damaged")
                data = file.read()
        except FileNotFoundError:
            raise BadPayload("missing") from None
        except OSError as error:
            raise BadPayload("damaged") from error
        if digest_of(data) != digest:
            raise BadPayload("damaged")
        return decode(data, record)

    def scan(self) -> tuple[set[bytes], list[Path]]:
        """Return the keys of all payload files, and all temporary files."""
        keys, temporaries = set(), []
        for path in self.directory.glob("[0-9a-f][0-9a-f]/*"):
            if path.suffix == _TEMPORARY:
                temporaries.append(path)
            elif path.suffix == _SUFFIX and (key := _key_of(path.stem)) and self.path(key) == path:
                keys.add(key)
        return keys, temporaries


def encode(record: ChunkRecord, stored: Payload) -> bytes:
    """Return the file of a chunk: its stored tensors and its record."""
    from safetensors.torch import save

    return save(dict(stored), {_METADATA: record.encode().decode()})


def most_bytes(record: ChunkRecord) -> int:
    """Greatest size of a chunk's file: its tensors, and a header with their names and its
    record."""
    tensors = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in record.stored.values())
    names = sum(6 * len(name) + 256 for name in record.stored)
    return tensors + names + 2 * len(record.encode()) + 256


def decode(data: bytes, record: ChunkRecord) -> dict[str, "Tensor"]:
    """Return the tensors of a chunk's file; BadPayload if it is damaged or of another record."""
    from safetensors.torch import load

    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict])
    except (SafetensorError, msgspec.DecodeError) as error:
        raise BadPayload("damaged") from error
    if (
        header.get("__metadata__", {}).get(_METADATA) != record.encode().decode()
        or specs(tensors) != record.stored
    ):
        raise BadPayload("foreign")
    return tensors


def _key_of(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
