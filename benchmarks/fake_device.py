"""A CUDA device that is not there: tensors that say `cuda:0`, hold their numbers on the CPU, and
are counted.

Code for CUDA runs unchanged on it, with the numbers of the CPU, and mixing devices raises as CUDA
does. It counts what a host asks of a device: launches, copies, and what makes it wait. It knows no
time, and no driver.

    with FakeDevice() as device:
        engine = Engine(model, device="cuda", enforce_eager=True)
        with device.counting() as operations:
            engine.generate(requests)

Triton kernels are counted, and give the numbers of the CPU's kernels. `FakeDevice(interprets=True)`
runs them as they are, in Triton's interpreter: slowly, with their own numbers, and in CUDA graphs,
too (`fake_graphs`)."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

if not torch.cuda.is_available():
    # read when Triton is first imported: generated kernels run there
    os.environ.setdefault("TRITON_INTERPRET", "1")

import kvgraft
from fake_graphs import FakeGraph
from kvgraft.engine import decoder
from kvgraft.kernels import dispatch
from kvgraft.kernels.cpu import align as cpu_align
from kvgraft.kernels.cpu import attention as cpu_attention
from kvgraft.kernels.cpu import sparse as cpu_sparse
from kvgraft.kernels.layout import AttentionLayout, Context
from kvgraft.kernels.reference import align as torch_align
from kvgraft.kernels.reference import changes as torch_changes
from kvgraft.kernels.reference import rows as torch_rows
from kvgraft.kernels.reference import topk as torch_topk
from kvgraft.kernels.triton import (
    align,
    attention,
    changes,
    generated,
    mass,
    rows,
    sparse,
    topk,
    workload,
)
from kvgraft.kernels.workload import Lengths
from kvgraft.prefill.stages import StageTimes

CUDA = torch.device("cuda", 0)
ROOT = str(Path(kvgraft.__file__).parent)
PROCESSORS = 132  # of an H100 or H200
CAPABILITY = (9, 0)
LAUNCHED = {
    align: ("_align_copy", "_align_paged"),
    attention: ("_segpaged", "_join"),
    changes: ("_anchors_nearby", "_average_changes", "_copy_changed", "_kv_changes"),
    mass: ("_weigh", "_receive"),
    rows: ("_add_norm", "_move_rows", "_norm_rotate", "_silu_mul"),
    sparse: ("_sparse", "_join"),
    topk: ("_radix", "_page_topk"),
    workload: ("_plan_work",),
}

_GENERATED = generated._kernel
VIEWS = frozenset(
    (
        "view", "slice", "select", "unsqueeze", "squeeze", "expand", "t", "transpose", "permute",
        "split",
        "split_with_sizes", "unbind", "alias", "as_strided", "detach", "_unsafe_view", "diagonal",
        "unfold", "chunk",
        "narrow", "view_as", "expand_as", "_reshape_alias", "lift_fresh", "movedim", "swapaxes",
        "squeeze_",
        "unsqueeze_", "unflatten", "flatten_", "numpy_T", "T", "mT",
    )
)  # fmt: skip
_ALLOCATIONS = frozenset(("empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"))
_ONE_LAUNCH = frozenset(
    ("rms_norm", "linear", "scaled_dot_product_attention", "embedding", "silu", "silu_")
)
_READS_BACK = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal"))
_SIZED_BY_VALUES = frozenset(
    (
        "nonzero", "unique2", "_unique2", "unique_dim", "unique_consecutive", "masked_select",
        "unique_dim_consecutive", "bincount",
    )
)  # fmt: skip
_INDEXING = frozenset(("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"))
_READS_ROWS = frozenset(("index", "_unsafe_index", "index_select"))
_OF_ROWS = _INDEXING | _READS_ROWS | frozenset(("index_copy_", "index_add_"))


class Kind(StrEnum):
    """What an operation is to the host."""

    LAUNCH = "launches"
    WAIT = "waits"  # for the device: values that the host reads, sizes that depend on values
    UPLOAD = "uploads"  # from pinned memory
    # from memory that is not pinned, which may wait for the stream
    WAITING_UPLOAD = "uploads that wait"
    EVENT = "events"
    ALLOCATION = "allocations"
    VIEW = "views"
    HOST = "host operations"  # on CPU tensors


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        nbytes: of its tensors, if it is on the device; where it indexes one, of the rows that it
            reads or writes.
        functions: of KVGraft, that it was called from, the innermost first.
    """

    kind: Kind
    name: str
    nbytes: int
    functions: tuple[str, ...]


class FakeTensor(Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: Tensor) -> "FakeTensor":
        made: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"), requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeTensor({self.held!r})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        FakeDevice.current.count(Kind.WAIT, "tolist", self.held.nbytes)
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, index: Any) -> Any:
        return Tensor.__getitem__(self, torch.tensor(index) if isinstance(index, list) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        # PyTorch would make it on `meta`
        index = torch.tensor(index) if isinstance(index, list) else index
        if isinstance(value, bool | int | float):
            value = FakeTensor(torch.full((), value, dtype=self.dtype))
        Tensor.__setitem__(self, index, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return FakeDevice.current.run(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """The device, while it is entered."""

    current: "FakeDevice"

    def __init__(self, *, interprets: bool = False) -> None:
        super().__init__()
        self._interprets = interprets
        self._graph: FakeGraph | None = None  # that is being captured
        self._operations: list[Operation] | None = None
        self._num_waits = 0
        self._patches = ExitStack()
        self._row_bytes: int | None = None  # by the kernel that is being launched, if that is known
        self._layouts: dict[int, tuple[AttentionLayout, AttentionLayout]] = {}
        self._entered = 0
        self._pinned = WeakTensorKeyDictionary()

    def __enter__(self) -> Self:
        if not self._entered:
            FakeDevice.current = self
            self._patch()
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._entered -= 1
        if not self._entered:
            self._patches.close()

    @classmethod
    def is_entered(cls) -> bool:
        """Whether there is a device."""
        return hasattr(cls, "current") and cls.current._entered > 0

    @contextmanager
    def counting(self) -> Iterator[list[Operation]]:
        """Record what is done inside."""
        operations: list[Operation] = []
        self._operations = operations
        try:
            yield operations
        finally:
            self._operations = None

    def count(self, kind: Kind, name: str, nbytes: int = 0) -> None:
        """Record an operation, if one is counting; RuntimeError for what may not be captured in a
        graph."""
        if self._graph is not None and kind in (Kind.WAIT, Kind.UPLOAD, Kind.WAITING_UPLOAD):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self._num_waits += kind is Kind.WAIT
        if self._operations is not None:
            self._operations.append(Operation(kind, name, nbytes, _functions()))

    def launch(
        self,
        name: str,
        kernel: Callable[..., Any],
        *args: Any,
        nbytes: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Count one launch, and run what gives its numbers on the CPU; RuntimeError for a tensor
        that is there. Unless it is said what the kernel reads and writes, that is all that it is
        given."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if strangers := [tensor.shape for tensor in given if not isinstance(tensor, FakeTensor)]:
            raise RuntimeError(
                f"{name}: all tensors must be on cuda:0, and {strangers} are on the CPU"
            )
        self.count(
            Kind.LAUNCH,
            name,
            sum(_held(tensor).nbytes for tensor in given) if nbytes is None else nbytes,
        )
        return self._uncounted(kernel, *args, **kwargs)

    def _uncounted(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operations, self._operations = self._operations, None
        try:
            return tree_map(_on_cuda, kernel(*tree_map(_held, args), **tree_map(_held, kwargs)))
        finally:
            self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator, on tensors of either device."""
        name = func._schema.name.split("::")[1]
        # there is no driver
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        to_device = any(
            _is_cuda(value) for value in (kwargs.get("device"), *args) if value is not None
        )
        if name == "to":
            return self._to(func, args, kwargs)
        if (
            name not in _ONE_LAUNCH | VIEWS
            and not to_device
            and func.namespace == "aten"
            and func._can_decompose()
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not on_device and not to_device:
            kind = (
                Kind.VIEW
                if name in VIEWS
                else Kind.ALLOCATION
                if name in _ALLOCATIONS
                else Kind.HOST
            )
            self.count(kind, name)
            return func(*args, **kwargs)
        # the CPU has none: its numbers are the caller's to replace
        if name == "_flash_attention_forward":
            self.count(Kind.LAUNCH, name, sum(_held(tensor).nbytes for tensor in given))
            return (FakeTensor(torch.empty_like(_held(args[0]))),)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "_to_copy":
            return self._moved(args[0], **kwargs)
        if name in _READS_BACK:
            self.count(Kind.WAIT, name, 8)
            return func(*tree_map(_held, args))
        return self._on_device(func, name, args, kwargs, given, on_device)

    def _on_device(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        on_device: Sequence[Any],
    ) -> Any:
        if name in _INDEXING:
            self._check_indices(name, *args[:2])
        elif strangers := [
            t.shape for t in given if on_device and not isinstance(t, FakeTensor) and t.dim()
        ]:
            raise RuntimeError(
                f"{func}: all tensors must be on cuda:0, and {strangers} are on the CPU"
            )
        if name in _SIZED_BY_VALUES or (
            name == "repeat_interleave" and not kwargs.get("output_size")
        ):
            self.count(Kind.WAIT, name, 8)
        kind = (
            Kind.VIEW if name in VIEWS else Kind.ALLOCATION if name in _ALLOCATIONS else Kind.LAUNCH
        )
        held_args, held_kwargs = tree_map(_held, args), tree_map(_held, kwargs)
        held_args = tree_map(
            lambda value: torch.device("cpu") if _is_cuda(value) else value, held_args
        )
        if _is_cuda(kwargs.get("device")):
            held_kwargs["device"] = "cpu"
        target = self._written(func, args, kwargs)
        result = self._result(
            kind, name, partial(func, *held_args, **held_kwargs), (held_args, held_kwargs), target
        )
        indexed = (
            (result if name in _READS_ROWS else given[-1], *given[1:])
            if name in _OF_ROWS
            else given
        )
        self.count(kind, name, sum(_held(tensor).nbytes for tensor in indexed))
        return tree_map(_on_cuda, result) if target is None else target

    def _result(
        self, kind: Kind, name: str, run: Callable[[], Any], given: Any, target: FakeTensor | None
    ) -> Any:
        """What an operator gives, on the CPU; its target, if it has one."""
        if self._graph is None or kind is Kind.VIEW:
            return run()
        if kind is Kind.ALLOCATION:
            return self._graph.allocate(run())
        if target is None:
            return self._graph.make(name, run, given)
        self._graph.write(name, run, given)
        return target.held

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> FakeTensor | None:
        """The argument that an operator writes to, if any."""
        for argument, value in zip(
            func._schema.arguments, [*args, *[None] * len(func._schema.arguments)], strict=False
        ):
            target = kwargs.get(argument.name, value)
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(target, FakeTensor)
            ):
                return target
        return None

    def _check_indices(self, name: str, indexed: Tensor, indices: Sequence[Tensor | None]) -> None:
        for index in indices:
            if index is None:
                continue
            if not isinstance(indexed, FakeTensor) and isinstance(index, FakeTensor):
                raise RuntimeError(f"{name}: a CPU tensor is indexed by one on cuda:0")
            if (
                isinstance(indexed, FakeTensor)
                and not isinstance(index, FakeTensor)
                and index.dim()
            ):
                self.count(Kind.WAITING_UPLOAD, f"{name} by a CPU tensor", index.nbytes)
            if isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
                self.count(Kind.WAIT, f"{name} by a mask", 8)

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        source, names = args[0], [argument.name for argument in func._schema.arguments]
        given = dict(zip(names[1:], args[1:], strict=False)) | kwargs
        if func._overloadname == "other":
            other = given.pop("other")
            given |= {"device": other.device, "dtype": other.dtype}
        device = torch.device(given.get("device") or source.device)
        device, dtype = (
            CUDA if device.type == "cuda" else device,
            given.get("dtype") or source.dtype,
        )
        if device == source.device and dtype == source.dtype and not given.get("copy"):
            return source
        return self._moved(
            source, device=device, dtype=dtype, non_blocking=bool(given.get("non_blocking"))
        )

    def _moved(
        self, source: Tensor, *, device: Any = None, non_blocking: bool = False, **form: Any
    ) -> Tensor:
        to_device = isinstance(source, FakeTensor) if device is None else _is_cuda(device)
        run = partial(torch.ops.aten._to_copy, _held(source), **form)
        there = to_device and isinstance(source, FakeTensor)
        moved: Tensor = (
            self._result(Kind.LAUNCH, "copy", run, (_held(source), form), None) if there else run()
        )
        self._count_move(source, to_device, non_blocking, moved.nbytes)
        return FakeTensor(moved) if to_device else moved

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        self._count_move(source, isinstance(target, FakeTensor), non_blocking, source.nbytes)
        run = partial(_held(target).copy_, _held(source))
        if isinstance(target, FakeTensor):
            self._result(Kind.LAUNCH, "copy_", run, (target.held, _held(source)), target)
        else:
            run()
        return target

    def _count_move(self, source: Tensor, to_device: bool, non_blocking: bool, nbytes: int) -> None:
        from_device = isinstance(source, FakeTensor)
        if from_device and to_device:
            self.count(Kind.LAUNCH, "copy", 2 * nbytes)
        elif to_device:
            pinned = non_blocking and source in self._pinned
            self.count(Kind.UPLOAD if pinned else Kind.WAITING_UPLOAD, "copy to cuda", nbytes)
        elif from_device:
            self.count(Kind.UPLOAD if non_blocking else Kind.WAIT, "copy to cpu", nbytes)
        else:
            self.count(Kind.HOST, "copy")

    def _patch(self) -> None:
        """Make KVGraft believe in the device, and count its kernels: their numbers are those of the
        CPU's kernels."""
        made, event = torch.tensor, self._event

        def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            plain: Tensor = made(data, *args, **kwargs)
            if device is not None and not _is_cuda(device):
                return plain.to(device)
            return self._moved(plain, device=CUDA) if _is_cuda(device) else plain

        real = dispatch.kernel
        replaced: list[tuple[Any, str, Any]] = [
            (torch, "tensor", tensor),
            (Tensor, "pin_memory", lambda tensor: self._pin(tensor)),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "synchronize", lambda *_: self.count(Kind.WAIT, "synchronize")),
            (torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
            (attention, "takes_runs", lambda device: True),
            (
                torch.cuda,
                "get_device_properties",
                lambda *_: SimpleNamespace(multi_processor_count=PROCESSORS),
            ),
            (decoder, "check_device", lambda name: None),
            (StageTimes, "_event", lambda times: event()),
        ]
        replaced += [
            (module, name, self._launcher(name, getattr(module, name)))
            for module, names in LAUNCHED.items()
            for name in names
        ]
        replaced.append(
            (generated, "_kernel", lambda text, name: self._launcher(name, _GENERATED(text, name)))
        )
        if self._interprets:
            replaced += [
                (attention, "_has_flash", lambda device: False),  # whose numbers are nobody's
                (torch.cuda, "CUDAGraph", lambda: FakeGraph(self._replay)),
                (torch.cuda, "graph", self._capture),
                (torch.cuda, "graph_pool_handle", object),
            ]
        else:
            replaced.append((dispatch, "kernel", lambda *given: self._kernel(real, *given)))
        for target, name, value in replaced:
            self._patches.enter_context(patch.object(target, name, value))

    def _pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self._pinned[pinned] = True
        return pinned

    def _event(self) -> Any:
        self.count(Kind.EVENT, "record")
        num_waits = self._num_waits

        def wait() -> None:
            # There is one stream: who has waited since then need not wait for the event.
            if self._num_waits == num_waits:
                self.count(Kind.WAIT, "event")

        return SimpleNamespace(synchronize=wait, elapsed_time=lambda other: 0.0)

    def _launcher(self, name: str, kernel: Any) -> Any:
        def launch(grid: Any, *args: Any, **kwargs: Any) -> None:
            known, tensors = self._row_bytes, [value for value in args if isinstance(value, Tensor)]
            known = _bytes_of_tiles(*args) if name == "_segpaged" else known
            self.count(
                Kind.LAUNCH,
                name,
                sum(_held(value).nbytes for value in tensors) if known is None else known,
            )
            if not self._interprets:
                return
            held = tree_map(_held, args)
            if self._graph is None:
                self._uncounted(kernel[grid], *held, **kwargs)
            else:
                self._graph.write(
                    name, partial(kernel[grid], *held, **kwargs), (grid, held, kwargs)
                )

        return type("Launcher", (), {"__getitem__": lambda kernel, grid: partial(launch, grid)})()

    @contextmanager
    def _capture(self, graph: FakeGraph, **_: Any) -> Iterator[None]:
        """In place of `torch.cuda.graph`."""
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    def _replay(self, compute: Callable[[], None]) -> None:
        self.count(Kind.LAUNCH, "graph")
        self._uncounted(compute)

    def _kernel(
        self, real: Callable[..., Any], name: str, device_type: str, implementation: Any = None
    ) -> Any:
        counted = real(name, device_type, implementation)
        on_cpu: dict[str, Callable[..., Any]] = {
            "add_norm": torch_rows.add_norm,
            "align_copy": cpu_align.align_copy,
            "align_paged": torch_align.align_paged,
            "anchors_nearby": torch_changes.anchors_nearby,
            "attention_mass": cpu_attention.attention_mass,
            "average_changes": torch_changes.average_changes,
            "block_sparse_attention": cpu_sparse.block_sparse_attention,
            "copy_changed": torch_changes.copy_changed,
            "generated": _interpreted,
            "generated_choice": _interpreted_choice,
            "kv_changes": torch_changes.kv_changes,
            "norm_rotate": torch_rows.norm_rotate,
            "page_topk": torch_topk.page_topk,
            "radix_topk": torch_topk.radix_topk,
            "read_rows": torch_rows.read_rows,
            "segpaged_attention": cpu_attention.segpaged_attention,
            "silu_mul": torch_rows.silu_mul,
            "write_rows": torch_rows.write_rows,
        }
        if device_type != "cuda" or name not in on_cpu:
            return counted

        def both(*args: Any) -> Any:
            self._row_bytes = _bytes_of_rows(name, args)
            counted(*args)
            self._row_bytes = None
            held = [
                self._held_layout(arg) if isinstance(arg, AttentionLayout) else arg for arg in args
            ]
            return self._uncounted(on_cpu[name], *held)

        return both

    def _held_layout(self, layout: AttentionLayout) -> AttentionLayout:
        """One whose slots are on the CPU; the latest is kept, since it keeps what it has worked
        out."""
        if not layout.contexts:
            raise RuntimeError(
                "kernels of the CPU read what the host knows: use FakeDevice(interprets=True)"
            )
        known, held = self._layouts.get(id(layout), (None, None))
        if known is not layout or held is None:
            contexts = tuple(
                Context(_held(context.positions), _held(context.slots))
                for context in layout.contexts
            )
            held = AttentionLayout(contexts, layout.sinks, layout.window)
            self._layouts = {id(layout): (layout, held)}
        return held


def _interpreted(
    text: str, name: str, tensors: Any, blocks: tuple[Tensor, Lengths], tile: int, heads: int
) -> None:
    """A generated kernel on what tensors hold, in Triton's interpreter."""
    table, counts = blocks[0], _held(blocks[1].counts)
    with patch.object(generated, "_kernel", _GENERATED):
        generated.generated(text, name, tensors, (table, Lengths(counts, counts)), tile, heads)


def _interpreted_choice(*given: Any) -> tuple[Tensor, Tensor]:
    """As `_interpreted`."""
    with patch.object(generated, "_kernel", _GENERATED):
        tables, lengths = generated.generated_choice(*given)
    return tables, lengths


def _held(value: Any) -> Any:
    return value.held if isinstance(value, FakeTensor) else value


def _on_cuda(value: Any) -> Any:
    return (
        FakeTensor(value)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        else value
    )


def _bytes_of_rows(name: str, args: Sequence[Any]) -> int | None:
    """Of a kernel that copies or compares rows of pools, those that it reads and writes, and all
    else that it is given; None for other kernels."""
    match name, args:
        case "align_paged", (caches, slots, *rest):
            row = len(caches) * caches[0].shape[1] * _row_bytes(caches[0])
        case "align_copy", (keys, values, layers, slots, *rest):
            row = len(layers) * keys.shape[2] * _row_bytes(keys) * (1 if values is None else 2)
        case "copy_changed" | "kv_changes", (pools, heads, (slots, turn), *others):
            row, rest = len(pools) * len(heads.streams) * _row_bytes(pools[0]), [turn, *others]
        case _:
            return None
    given = (leaf.nbytes for leaf in tree_leaves(rest) if isinstance(leaf, Tensor))
    return int(2 * row * slots.shape[-1] + sum(given))


def _bytes_of_tiles(*given: Any) -> int:
    """Of keys and values that `_segpaged` reads: all that a tile of queries sees, once for each
    head that sees all."""
    _, keys, _, _, _, *rest = given
    tiles, positions, _, places = (_held(value).numpy() for value in rest[:4])
    _, first, count, is_run, _ = tiles.T
    seen = int(((positions[first + count - 1] + 1) * (is_run == 0)).sum())
    return seen * int((places[2] == 0).sum()) * 2 * _row_bytes(keys)


def _row_bytes(pool: Tensor) -> int:
    return pool.shape[-1] * pool.element_size()


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def _functions() -> tuple[str, ...]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOT):
            found.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
