"""Argument checks of all operations. They run before any kernel is launched."""

from __future__ import annotations

import torch

from tritoncomm_kernels.devices import has_addresses

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Indices are int32. A kernel computes them up to the end of a block, which may lie beyond the last element.
INDEX_LIMIT = 2**31 - 2**16


def check_vector(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    numel: int | None = None,
    like: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` unless ``tensor`` is a contiguous 1-D tensor with one of ``dtypes``.

    ``name`` is the name of the argument in the message. ``numel`` is the required number of elements. ``like`` is a
    tensor on the required device.
    """
    if tensor.dtype not in dtypes:
        legal = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}: convert it to {legal}")
    if tensor.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: flatten it to one dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: call .contiguous() on it")
    length = tensor.shape[0]
    if length > INDEX_LIMIT:
        raise ValueError(
            f"{name} has {length} elements, too many for int32 indices: split it into parts of at most {INDEX_LIMIT}"
        )
    if numel is not None and length != numel:
        raise ValueError(f"{name} has {length} elements, expected {numel}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}: move it to {like.device}, like the other tensors")
    if tensor.data_ptr() % tensor.itemsize and has_addresses(tensor.device):
        raise ValueError(
            f"{name} starts at an address that is not a multiple of its element size {tensor.itemsize}: "
            "call .clone() on it"
        )


def check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ``ValueError`` if two tensors share memory. A tensor that is written must not overlap another one."""
    first, second = _extent(tensor), _extent(other)
    if tensor.device == other.device and first[0] < second[1] and second[0] < first[1]:
        raise ValueError(f"{name} shares memory with {other_name}: pass a tensor with memory of its own")


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ``ValueError`` unless both arguments are the same memory."""
    if tensor.shape != other.shape or tensor.device != other.device or _extent(tensor) != _extent(other):
        raise ValueError(
            f"{name} and {other_name} are different tensors: without a gradient, pass the same tensor as both"
        )


def check_in_place(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ``ValueError`` if two tensors overlap without being the same memory."""
    if _extent(tensor) != _extent(other):
        check_apart(name, tensor, other_name, other)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def channels_last(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the number of channels, and of positions, of an image whose channels are innermost in memory.

    The image may be in ``torch.channels_last`` or ``torch.channels_last_3d``. Return None for other tensors.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats or not tensor.is_contiguous(memory_format=formats[tensor.dim()]):
        return None
    return tensor.shape[1], tensor.shape[2:].numel()
