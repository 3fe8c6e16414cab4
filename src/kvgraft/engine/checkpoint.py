"""Files of a model directory: JSON, safetensors headers, and a fingerprint of the whole
checkpoint."""

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_SAMPLE_BYTES = 4096
_T = TypeVar("_T")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _StoredTensor(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


class UnsupportedModel(ValueError):
    """The model directory is readable, but this engine would not compute the function that its
    authors published."""


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the safetensors files of the checkpoint: `model.safetensors`, or the shards that its
    index names.

    Raises:
        FileNotFoundError: there is neither, or a shard is missing.
    """
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise FileNotFoundError(
            f"{model_dir} has no model.safetensors and no {index.name}: convert the weights first"
        )
    names = sorted(set(read_json(index, _Index).weight_map.values()))
    for name in names:
        if Path(name).name != name or not (model_dir / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is not a file of {model_dir}")
    return tuple(model_dir / name for name in names)


def read_json(path: Path, kind: type[_T]) -> _T:
    """Decode a JSON file of a model directory.

    Args:
        kind: msgspec type that the file must have.

    Raises:
        FileNotFoundError: the file does not exist.
        UnsupportedModel: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is not a model directory: it has no {path.name}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is malformed: {error}") from error


def _read_header(path: Path) -> tuple[bytes, dict[str, _StoredTensor]]:
    """Return the header of a safetensors file as bytes and decoded.

    The file begins with an 8-byte little-endian length and that number of bytes of JSON.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return header, {
            name: msgspec.json.decode(entry, type=_StoredTensor) for name, entry in entries.items()
        }
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error


def stored_dtype(files: tuple[Path, ...]) -> torch.dtype:
    """Return the dtype of a checkpoint's weights; UnsupportedModel if the native engine does not
    compute in it."""
    dtypes = {tensor.dtype for path in files for tensor in _read_header(path)[1].values()}
    if not dtypes or not dtypes <= _STORED_DTYPES.keys():
        raise UnsupportedModel(
            f"weights of dtypes {sorted(dtypes)} are not supported: F32, F16 and BF16 are"
        )
    return _STORED_DTYPES[min(dtypes)]


def identify(model_dir: str | Path) -> str:
    """Return the fingerprint of a checkpoint, in hexadecimal, for any host and dtype.

    It is a SHA-256 over config.json and, for every weight file, its name, size, header and a sample
    of each tensor. The samples distinguish two checkpoints of one shape (a model and its fine-tune)
    without reading them whole.

    Raises:
        FileNotFoundError: the directory, its config.json or its safetensors files are missing.
        UnsupportedModel: a file is no safetensors file.
    """
    model_dir = Path(model_dir)
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(f"{model_dir} is not a model directory: it has no config.json")

    config = (model_dir / "config.json").read_bytes()
    digest = hashlib.sha256(f"{len(config)}|".encode() + config)
    for path in weight_files(model_dir):
        header, tensors = _read_header(path)
        digest.update(f"|{path.name}|{path.stat().st_size}|{len(header)}|".encode() + header)
        with path.open("rb") as file:
            for start, end in sorted(tensor.data_offsets for tensor in tensors.values()):
                size = min(_SAMPLE_BYTES, end - start)
                file.seek(8 + len(header) + (start + end - size) // 2)
                digest.update(file.read(size))

    return digest.hexdigest()
