"""The element types that travel to parameter servers and are kept there."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
).split()
_DTYPES = {name: np.dtype(name) for name in _NAMES}
# NumPy knows these where ml_dtypes, which JAX brings, is imported.
_DTYPES |= {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
}


def dtype_of(name: Any) -> np.dtype:
    """The dtype of a name, or of something that has one.

    Raises:
        ValueError: it is none that a parameter server can keep.
    """
    found = _DTYPES.get(str(getattr(name, "name", name)))
    if found is None:
        raise ValueError(
            f"Expected a dtype of {', '.join(_DTYPES)}. Got {name!r}. Convert to one of them."
        )
    return found


def is_small_float(dtype: np.dtype) -> bool:
    """Whether sums in this type need a wider one: float16, bfloat16 and the float8 types."""
    return dtype.itemsize <= 2 and dtype.name.startswith(("float", "bfloat"))
