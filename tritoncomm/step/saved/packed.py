"""What belongs to one rank alone, as bytes: plain data, of which ``torch.load(weights_only=True)`` reads all."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tritoncomm.errors import ConfigurationError

Keys = tuple[object, ...]  # and numbers, from the outside to the inside


def packed(rest: Mapping[str, Any]) -> bytes:
    """Return ``rest`` as bytes, with numbers of Python instead of those of NumPy.

    Raises:
        ConfigurationError: :func:`unpacked` cannot read it. The message says what, and where it is.
    """
    plain = _with_numbers(rest)
    try:
        content = _bytes_of(plain)
        _value_of(content)
    except Exception as error:  # objects raise what they want
        path, value = _unreadable(plain, ())
        field, *keys = path or ("state",)
        if field == "optimizer" and keys:
            field, *keys = keys  # they are fields of its state dict
        where = {"inner": "state"}.get(str(field), field)
        raise ConfigurationError(
            f"{where}{''.join(f'[{key!r}]' for key in keys)} of the optimizer is a {type(value).__name__}, which "
            "torch.load(weights_only=True) does not read: keep numbers, texts, tensors, and dicts, lists or tuples of "
            "them there, or remove it before you save"
        ) from error
    return content


def unpacked(content: bytes) -> Any:
    """Return what :func:`packed` got.

    Raises:
        ConfigurationError: It is damaged, or no plain data.
    """
    try:
        return _value_of(content)
    except Exception as error:  # damaged files raise many types
        raise ConfigurationError(f"the state of a rank cannot be read: {error}") from error


def _bytes_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _value_of(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def _with_numbers(value: Any) -> Any:
    """Return ``value`` with numbers of Python instead of those of NumPy, as schedules compute them."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_numbers(each)) for key, each in value.items())
    return type(value)(map(_with_numbers, value)) if type(value) in (list, tuple) else value


def _unreadable(value: Any, path: Keys) -> tuple[Keys, Any]:
    """Return the path and the value of the first part of ``value`` that cannot be read, itself if no part is it."""
    parts: Mapping[Any, Any] | Sequence[Any] = value if type(value) in (dict, OrderedDict, list, tuple) else ()
    for key, each in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        try:
            _value_of(_bytes_of(each))
        except Exception:
            return _unreadable(each, (*path, key))
    return path, value
