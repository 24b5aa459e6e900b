"""Fingerprints: every single flipped bit is seen, and nothing but the bits counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from probes.guard.fingerprints import (
    CHUNK,
    PERIOD,
    FingerprintReader,
    _column_sums,
    _pieces,
    _product,
    _together,
    _words,
)
from trainer.faults.injectors.integrity import flip_bit

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def fingerprint(tensor: Tensor) -> int:
    return FingerprintReader().read({"it": tensor}).values()["it"]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, PERIOD), (2 * PERIOD + 1,)])
def test_each_bit_of_each_element_counts(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    before = fingerprint(tensor)
    elements = range(tensor.numel()) if tensor.numel() < 64 else (0, 1, PERIOD, tensor.numel() - 1)
    for element in elements:
        for bit in range(32):
            flip_bit(tensor, bit, element)
            assert fingerprint(tensor) != before, (element, bit)
            flip_bit(tensor, bit, element)
    assert fingerprint(tensor) == before


def test_a_flip_in_each_part_of_a_long_tensor_counts() -> None:
    tensor = torch.randn(4 * CHUNK + 3)  # two chunks of words, and an end that is no whole word
    before = fingerprint(tensor)
    for element in (0, 2 * CHUNK - 1, 2 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK + 2):
        flip_bit(tensor, 31, element)
        assert fingerprint(tensor) != before, element
        flip_bit(tensor, 31, element)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_has_one(dtype: torch.dtype) -> None:
    tensor = torch.arange(10).to(dtype)
    other = tensor.clone()
    other[9] = 0
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(other)


def test_equal_numbers_with_other_bits_differ() -> None:
    assert fingerprint(torch.tensor([0.0, 1.0])) != fingerprint(torch.tensor([-0.0, 1.0]))
    quiet, payload = torch.tensor([0x7FC00000, 0], dtype=torch.int32), torch.tensor([0x7FC00001, 0], dtype=torch.int32)
    assert fingerprint(quiet.view(torch.float32)) != fingerprint(payload.view(torch.float32)), "two kinds of NaN"


def test_order_counts_and_layout_does_not() -> None:
    tensor = torch.randn(6, 10)
    assert fingerprint(tensor) != fingerprint(tensor.flip(0).contiguous())
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t()), "the same numbers, kept by columns"
    odd = torch.cat((torch.zeros(1), tensor.flatten()))[1:]
    assert odd.storage_offset() == 1
    assert fingerprint(odd) == fingerprint(tensor), "not aligned to a word"


def test_what_has_changed_is_read_again() -> None:
    reader, tensor = FingerprintReader(), torch.zeros(100)
    tensors = {"a": tensor, "b": torch.ones(3), "step": torch.tensor(4.0)}
    before = reader.read(tensors).values()
    flip_bit(tensor, 0, 50)
    tensors["b"] = torch.ones(3)  # in other memory
    after = reader.read(tensors).values()
    assert [name for name in before if before[name] != after[name]] == ["a"]
    tensors["step"] += 1
    assert reader.read(tensors).values()["step"] != before["step"]


def test_nothing_to_read() -> None:
    assert FingerprintReader().read({"empty": torch.empty(0, 4), "one": torch.ones(1)}).values()["empty"] == 0
    assert FingerprintReader().read({}).values() == {}


def test_what_a_gpu_computes_is_the_same_number() -> None:
    """Its two ways, on a CPU: by columns, and many short vectors at once."""
    vectors = [_words(torch.randn(size)) for size in (2, 700, 2 * PERIOD, 6 * PERIOD + 10, 4 * CHUNK + 2)]
    expected = [int(_product(_pieces(words))) for words in vectors]
    assert [int(_column_sums(words)) for words in vectors] == expected
    assert _together(vectors).tolist() == expected
