"""One number for the bits of each tensor. Ranks compare these numbers in place of values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from tritoncomm.step.tensors.shards import local

_COLUMNS = 16  # words in a row
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that a multiplication by it modulo 2**64 loses no bit
_LOW = 0xFFFFFFFF


def number_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number of the bits of ``tensor``, or of this rank's shard of a DTensor: int64 ``[]``.

    It is a sum of integers modulo 2**64, which no order of additions changes: processors of all kinds compute the same.
    Equal values have equal numbers, whatever their strides. Other values, and equal ones in other places, have other
    numbers, except by chance. That of zeros is zero.

    Words of 8 bytes are added along the rows and the columns of a matrix, so that the values are read twice and not
    copied. A word that moves changes a sum of a row or of a column. Each sum is multiplied by a number of its place.
    Before, high bits of both are spread: otherwise two values that differ in sign could change their places unnoticed.
    """
    shard = local(tensor.detach())
    flat = torch.view_as_real(shard.resolve_conj()) if shard.is_complex() else shard
    # A contiguous tensor of one element may have any stride, and then cannot be viewed as bytes.
    octets = flat.contiguous().as_strided((flat.numel(),), (1,)).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    rows = words[: len(words) // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    sums = torch.cat([words[rows.numel() :], octets[whole:].long(), rows.sum(0), rows.sum(1)])
    places = torch.arange(1, len(sums) + 1, device=sums.device)
    return (_spread(sums) * (_spread(places) | 1)).sum()


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Let low bits of ``numbers`` (int64) depend on all others. That of zero is zero."""
    product = numbers * _FACTOR
    return product ^ ((product >> 32) & _LOW)


def numbers(values: Iterable[Any]) -> list[int]:
    """Return :func:`number_of` of each tensor in ``values``, and :func:`number_of_text` of each other value's text.

    The host waits for a GPU once.
    """
    found, of_devices = list[int](), dict[torch.device, dict[int, torch.Tensor]]()
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            number = number_of(value)
            of_devices.setdefault(number.device, {})[place] = number
        found.append(0 if isinstance(value, torch.Tensor) else number_of_text(repr(value)))
    for of_device in of_devices.values():
        for place, figure in zip(of_device, torch.stack(list(of_device.values())).tolist(), strict=True):
            found[place] = figure
    return found


def number_of_text(text: str) -> int:
    """Return a number that tells ``text`` from others, and that a float holds: 48 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
