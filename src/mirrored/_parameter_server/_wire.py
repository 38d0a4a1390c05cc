"""Messages between processes: a JSON header and raw arrays, both ways, and their checks.

Owns what a header says and what of it is refused: arrays must be of a known dtype and of
exactly the bytes that came. Nothing here unpickles anything, or knows how bytes travel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mirrored._errors import ServerError
from mirrored._parameter_server._channel import Fields

MOST_HEADER_BYTES = 16 << 20
MOST_ARRAYS = 1 << 16
_MOST_DIMENSIONS = 64
# A sum of sizes that fits no memory is refused before anything is made of it.
_MOST_BYTES = 1 << 40

_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "int4", "uint4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e3m4"),
    )
    for kind in [getattr(ml_dtypes, kind, kind)]
}

# The words of an answer; a question's word is its operation.
ANSWER = "answer"
ERROR = "error"


class Description(NamedTuple):
    """What a header says of one array."""

    dtype: np.dtype
    shape: tuple[int, ...]
    byte_count: int


class Header(NamedTuple):
    """What a header says."""

    number: int
    """which question this is, or which one it answers"""
    word: str
    fields: Fields
    arrays: list[Description]


def is_known_dtype(dtype: np.dtype) -> bool:
    """Whether arrays of a dtype can be sent."""
    return _DTYPES.get(dtype.name) == dtype


def packed(number: int, word: str, fields: Fields, arrays: Sequence[np.ndarray]) -> bytes:
    """Makes a header."""
    said = [[array.dtype.name, array.shape] for array in arrays]
    return json.dumps([number, word, fields, said], separators=(",", ":")).encode()


def parsed(header: bytes | memoryview) -> Header:
    """Reads a header, whoever sent it; raises ServerError if it is none."""
    if len(header) > MOST_HEADER_BYTES:
        raise refused(
            found=f"a header of {len(header)} bytes", expected=f"{MOST_HEADER_BYTES} at most"
        )
    try:
        said = json.loads(bytes(header))
    except (ValueError, RecursionError) as error:
        raise refused(found=f"a header that is not JSON ({error})", expected="JSON") from None
    if not isinstance(said, list) or len(said) != 4:
        raise refused(found="a header of another form", expected="[number, word, fields, arrays]")
    number, word, fields, arrays = said
    if not (
        type(number) is int
        and 0 <= number < 1 << 63
        and isinstance(word, str)
        and isinstance(fields, dict)
        and isinstance(arrays, list)
        and len(arrays) <= MOST_ARRAYS
    ):
        raise refused(found="a header of another form", expected="[number, word, fields, arrays]")
    return Header(number, word, fields, [_description(array) for array in arrays])


def as_array(described: Description, content: Any) -> np.ndarray:
    """Makes an array of bytes that came; they are not copied."""
    found = memoryview(content).nbytes
    if found != described.byte_count:
        raise refused(
            found=f"{found} bytes for {described.dtype}{list(described.shape)}",
            expected=f"{described.byte_count}",
        )
    if not found:
        return np.empty(described.shape, described.dtype)
    return np.frombuffer(content, described.dtype).reshape(described.shape)


def raw(array: np.ndarray) -> np.ndarray:
    """An array's bytes, in order; copied only if they do not lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def refused(*, found: str, expected: str) -> ServerError:
    """The error for a message that is not understood."""
    return ServerError(
        fact=f"a message was refused: {found}.",
        expected=f"{expected}.",
        hint="all processes must run the same version of mirrored; if they do, somebody else "
        "sent it.",
    )


def _description(said: Any) -> Description:
    if isinstance(said, list) and len(said) == 2:
        name, shape = said
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise refused(
                found=f"an array of dtype {str(name)[:40]!r}", expected="a dtype of numbers"
            )
        if (
            isinstance(shape, list)
            and len(shape) <= _MOST_DIMENSIONS
            and all(type(size) is int and 0 <= size <= _MOST_BYTES for size in shape)
        ):
            # Each size alone is bounded too, so that no product can wrap around.
            count = math.prod(shape) * dtype.itemsize
            if count <= _MOST_BYTES:
                return Description(dtype, tuple(shape), count)
    raise refused(found=f"an array described as {str(said)[:80]}", expected="[dtype, shape]")
