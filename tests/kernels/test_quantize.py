"""What both ends of a section must agree on: the form of indices, the tables of levels, and the bits of a scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import DENSE_LEVELS

import tritoncomm_kernels as kernels
from tritoncomm_kernels import dense_bits, quantize
from tritoncomm_kernels.formats import DENSE_FORMATS, ENTRY_FORMATS, FORMATS, INDICES, SMALL_FORMATS
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import write_one

# The menu of each format, in 64ths of the scale.
NUMERATORS = {
    "1bit": [[70], [80], [96], [126], [64]],
    "2bit": [[69, 90], [77, 160], [83, 384], [80, 4096], [80, 1024]],
    "3bit": [
        [67, 77, 88, 106],
        [70, 96, 134, 205],
        [77, 141, 288, 640],
        [64, 1024, 16384, 262144],
        [64, 256, 1024, 4096],
    ],
    "4bit": [
        [65, 69, 74, 80, 88, 98, 112, 136],
        [67, 77, 91, 109, 134, 168, 216, 288],
        [68, 88, 120, 168, 248, 384, 600, 1000],
        [64, 256, 1024, 4096, 16384, 65536, 262144, 1048576],
        [64, 128, 256, 512, 1024, 2048, 4096, 8192],
    ],
}
# With 8 bits, level (e, m) of a table is (1 + m / unit) * 2^e: unit, number of m, number of e.
FLOATS = [(64, 128, 1), (16, 16, 8), (8, 8, 16), (4, 4, 32), (32, 32, 4)]
MENU = {name: [np.array(table) / 64 for table in tables] for name, tables in NUMERATORS.items()} | {
    "8bit": [np.array([(1 + m / unit) * 2.0**e for e in range(high) for m in range(low)]) for unit, low, high in FLOATS]
}
ONE = 0x3F800000  # the bits of the scale 1.0
# Significant bits of the scale by the number of workers that a mean is taken over.
SCALE_BITS = {1: 8, 8: 8, 9: 7, 16: 7, 17: 6, 64: 5, 65: 4, 256: 3, 512: 2, 513: 1, 1024: 1, 5000: 1}


def chosen(values: str, levels: np.ndarray, largest: float) -> int:
    """Return the table for values of which every second one is a level, and one of the others is the ``largest``.

    Only every second of so many values is in the sample that decides which table has the least error.
    """
    numbers = np.ones(quantize.SAMPLE + 2, np.float32)
    numbers[::2] = np.resize(levels, len(numbers[::2]))
    numbers[1] = largest
    header = quantize.quantize(numbers, FORMATS[values]).header
    assert header - header % 2**16 == ONE
    return header % 2**16


def test_form_switches() -> None:
    """Indices are a bitmap up to four coordinates per entry, and then have low bits."""
    for span, indices, words in ((8, [3, 7], [2, 0b10001000]), (9, [3, 8], [2, 0b1001, 1, 1])):
        layout = Layout.of(2, span, INDICES)
        out, _ = write_one(layout, 0, torch.tensor(indices, dtype=torch.int32), torch.empty(0))
        assert out.tolist() == words
    assert [Layout.of(33, span, INDICES).words for span in (132, 133)] == [6, 8]


@pytest.mark.parametrize("values", MENU)
def test_menu(values: str) -> None:
    """The tables of levels are those of the format, literally."""
    fmt = FORMATS[values]
    assert quantize.menu(fmt) == tuple(tuple(table) for table in MENU[values])
    for number, table in enumerate(MENU[values]):
        decoded = quantize.dequantize(np.arange(1 << fmt.bits), ONE | number, fmt)
        assert np.array_equal(decoded, np.concatenate([table, -table]))


def test_every_format_is_listed_here() -> None:
    """A format whose tables or levels this file does not know would not be tested."""
    assert {*MENU} == {*ENTRY_FORMATS} - {"fp32"}
    assert {*DENSE_LEVELS} == {*DENSE_FORMATS} - {"fp32"}
    assert {name for name, levels in DENSE_LEVELS.items() if 0 in levels} == {*SMALL_FORMATS} - {"fp32"}


@pytest.mark.parametrize("values", MENU)
def test_reach_of_tables(values: str) -> None:
    """A table that fits best is taken if the largest ratio is at most 32 times its top level, and not above."""
    fmt, tables = FORMATS[values], MENU[values]
    cover = max(table[-1] for table in tables) * (16 if fmt.bits < 3 else 1)
    assert [quantize.range_of(np.float32([1, ratio]), fmt).scale for ratio in (cover, 2 * cover)] == [1, 2]
    for number, table in enumerate(tables):
        edge = np.float32(32 * table[-1])
        assert chosen(values, table, min(edge, cover)) == number
        if edge < cover:
            assert chosen(values, table, np.nextafter(edge, np.float32(np.inf))) != number


@pytest.mark.parametrize("seed", range(6))
def test_the_better_of_two_nearly_equal_tables(seed: int) -> None:
    """The table with the least sum in fp64 is taken, however near the second one is.

    The values spread just as far as where the best table changes. There, sums in fp32 are equal, or in the other order.
    """
    excess = np.random.default_rng(seed).exponential(1, 1000)
    excess[0] = 0

    def values(spread: float) -> np.ndarray:
        return (1 + spread * excess).astype(np.float32)

    near, far = 0.05, 0.6
    assert [np.argmin(squared_errors(values(spread))) for spread in (near, far)] == [0, 1]
    for _ in range(25):
        middle = (near + far) / 2
        errors = squared_errors(values(middle))
        near, far = (middle, far) if errors[0] < errors[1] else (near, middle)
    for spread in near + np.arange(-20, 21) * (far - near):
        assert quantize.quantize(values(spread), FORMATS["4bit"]).header % 2**16 == np.argmin(
            squared_errors(values(spread))
        )


def squared_errors(values: np.ndarray) -> np.ndarray:
    """Return the sums in fp64 of the squared errors of values from 1 on, for each table of 4 bits."""
    centres = ((values.view(np.uint32) & 0xFFFF0000) | 0x8000).view(np.float32)
    levels = [
        table[np.searchsorted((table[:-1] + table[1:]) / 2, centres)].astype(np.float32) for table in MENU["4bit"]
    ]
    return np.square(values - np.stack(levels)).sum(axis=1, dtype=np.float64)


@pytest.mark.parametrize("world_size", SCALE_BITS)
def test_bits_of_a_scale(world_size: int) -> None:
    """The scale of a mean has so few bits that its product with the number of workers stays exact."""
    values = np.float32([world_size * 255 / 128])
    scale = np.float32(2 - 2.0 ** (1 - SCALE_BITS[world_size]))
    assert quantize.quantize(values, FORMATS["8bit"], world_size).header // 2**16 == int(scale.view(np.uint32)) // 2**16
    # Also that of a mean of dense values, of which the other ranks have zeros: 4/3, rounded up.
    fmt, own = FORMATS["2bit"], torch.full((dense_bits.BLOCK * world_size,), world_size * 4 * 4 / 3)
    received = torch.zeros((world_size, dense_bits.words(dense_bits.BLOCK, fmt)), dtype=torch.int32)
    mean = kernels.round_mean(received, own, 0, fmt).repeat(world_size, 1)
    unit = 2 ** (SCALE_BITS[world_size] - 1)
    assert dense_bits.scales_of(mean, own.numel(), fmt)[0].tolist() == [math.ceil(4 / 3 * unit) / unit]


@pytest.mark.parametrize("world_size", [2, 3, 7, 8, 9, 15, 31, 63, 64, 100, 127, 255, 500, 511, 1000, 1023, 1024])
def test_rest_of_a_mean_is_exact(world_size: int) -> None:
    """With 8 bits, the rest of a value at the last hop is exact for up to 1024 workers, in the worst case too."""
    scale = 2 - 2.0 ** (1 - quantize.scale_bits(world_size))
    table = world_size * scale * MENU["8bit"][0]
    values = np.empty(quantize.SAMPLE + 2, np.float32)
    values[::2] = np.resize(table, len(values[::2]))
    values[1::2] = np.linspace(28, 31.9, len(values[1::2])) * table[-1]
    codes, header, _ = quantize.quantize(values, FORMATS["8bit"], world_size)
    assert header == int(np.float32(scale).view(np.uint32))
    sent = world_size * quantize.dequantize(codes, header, FORMATS["8bit"], world_size).astype(np.float64)
    for exact in (sent, values - sent):
        assert np.array_equal(exact.astype(np.float32), exact)
