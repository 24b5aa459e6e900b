"""Tensors written without pickling them are what torch.load reads, to the last bit."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.disk_tier.tensor_frames import HashedFile, Headers, bytes_of

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_head_and_the_bytes_are_the_tensor(dtype: torch.dtype) -> None:
    headers = Headers()
    for number, shape in enumerate([(3, 5), (), (7,), (0, 4), (2, 1, 3)]):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(number)).mul(40).to(dtype)
        for value in (tensor, tensor.flip(0) if tensor.ndim else tensor, tensor.T if tensor.ndim == 2 else tensor):
            header = headers.of(value)
            assert header is not None
            loaded = torch.load(io.BytesIO(header + bytes(bytes_of(value))), weights_only=True)
            assert loaded.shape == value.shape
            assert loaded.dtype == value.dtype
            assert bytes(bytes_of(loaded)) == bytes(bytes_of(value))


def test_a_type_that_torch_writes_otherwise_has_no_head() -> None:
    assert Headers().of(torch.zeros(3, dtype=torch.float8_e4m3fn)) is None


class Small(io.RawIOBase):
    """Takes at most so many bytes at a time."""

    def __init__(self, path: Path) -> None:
        self.inner = path.open("wb", buffering=0)

    def write(self, part: object) -> int:
        return self.inner.write(memoryview(part)[:1000])  # type: ignore[arg-type, return-value]


def test_all_is_written_and_hashed_once_whatever_the_sizes(tmp_path: Path) -> None:
    parts = [bytes([number % 251]) * size for number, size in enumerate([0, 1, 900_000, 70, 300_000, 260_000, 5])]
    file = HashedFile(Small(tmp_path / "shard"))
    for part in parts:
        file.write(part)
    file.flush()
    whole = b"".join(parts)
    assert (tmp_path / "shard").read_bytes() == whole
    assert file.size == len(whole)
    assert file.digest.hexdigest() == hashlib.blake2b(whole, digest_size=32).hexdigest()
