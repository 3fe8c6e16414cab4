"""Uploads: one transfer, from pinned memory, for tensors of any dtype."""

import torch

from fake_device import FakeDevice, FakeTensor, Kind
from kvgraft.kernels.upload import upload

TENSORS = (
    torch.tensor([[1, -2], [3, 4]]),
    torch.tensor([True, False, True]),
    torch.tensor([[1.5, -2.5]]).T,
    torch.zeros(0, 3, dtype=torch.int32),
    torch.tensor([7], dtype=torch.int32),
    torch.arange(6.0).to(torch.bfloat16).view(2, 3).T,
)


def test_tensors_of_all_dtypes_arrive_in_one_pinned_transfer():
    with FakeDevice() as device, device.counting() as operations:
        placed = upload(torch.device("cuda", 0), *TENSORS)
    for tensor, copy in zip(TENSORS, placed, strict=True):
        assert isinstance(copy, FakeTensor)
        assert copy.dtype is tensor.dtype
        assert torch.equal(copy.held, tensor)
    assert [one.kind for one in operations if one.kind in (Kind.UPLOAD, Kind.WAITING_UPLOAD)] == [
        Kind.UPLOAD
    ]
    assert not any(one.kind in (Kind.LAUNCH, Kind.WAIT) for one in operations)


def test_on_the_cpu_nothing_is_copied():
    assert all(
        copy is tensor
        for copy, tensor in zip(upload(torch.device("cpu"), *TENSORS), TENSORS, strict=True)
    )
