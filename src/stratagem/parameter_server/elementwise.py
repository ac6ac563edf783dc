"""The operations that a row program may use: names of JAX's primitives, done by NumPy.

Only what stands in `OPERATIONS` is ever executed; names from the wire are looked up there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.dtypes import dtype_of

# Results are of these types alone.
DTYPES: Mapping[str, np.dtype] = {
    name: dtype_of(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64",
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation on arrays of equal shape, and scalars.

    Attributes:
        operands: how many it takes.
        run: `(out, *operands) -> array`; `out` is an array for the result that overlaps no
            operand, or None.
        parameter: name of its one static parameter, if it has one; `run` takes it by that name.
        valid: says whether a value of the parameter may be used.
        in_place: whether `out` may be one of the operands.
    """

    operands: int
    run: Callable[..., Any]
    parameter: str | None = None
    valid: Callable[[Any], bool] = lambda value: True
    in_place: bool = False


def _ufunc(function: np.ufunc) -> Operation:
    return Operation(
        function.nin, lambda out, *operands: function(*operands, out=out), in_place=True
    )


def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that makes its result anew."""
    return lambda out, *operands: function(*operands)


def _div(out: Any, x: Any, y: Any) -> Any:
    if np.issubdtype(x.dtype, np.integer):  # XLA rounds towards zero
        return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype)
    return np.divide(x, y, out=out)


def _rsqrt(out: Any, x: Any) -> Any:
    root = np.sqrt(x, out=out)
    return np.divide(x.dtype.type(1), root, out=out)


def _logistic(x: Any) -> Any:
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _clamp(out: Any, low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low, out=out), high, out=out)


def _select(out: Any, which: Any, no: Any, yes: Any) -> Any:
    if out is None:
        return np.where(which, yes, no)
    np.copyto(out, no)
    np.copyto(out, yes, where=which)
    return out


def _convert(out: Any, x: Any, dtype: str) -> Any:
    if out is None:
        return x.astype(DTYPES[dtype])
    np.copyto(out, x, casting="unsafe")
    return out


def _integer_pow(out: Any, x: Any, y: int) -> Any:
    if y == 2:
        return np.square(x, out=out)
    power = x.dtype.type(1)
    for _ in range(abs(y)):
        power = np.multiply(power, x)
    return np.divide(x.dtype.type(1), power) if y < 0 else power


def _round(out: Any, x: Any, method: int) -> Any:
    if method == _TO_EVEN:
        return np.rint(x, out=out)
    return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)


_TO_EVEN = 1
_MOST = 64  # powers beyond are not written as products

OPERATIONS: Mapping[str, Operation] = {
    "add": _ufunc(np.add),
    "add_any": _ufunc(np.add),
    "sub": _ufunc(np.subtract),
    "mul": _ufunc(np.multiply),
    "div": Operation(2, _div),
    "rem": _ufunc(np.fmod),
    "max": _ufunc(np.maximum),
    "min": _ufunc(np.minimum),
    "pow": _ufunc(np.power),
    "atan2": _ufunc(np.arctan2),
    "neg": _ufunc(np.negative),
    "sign": _ufunc(np.sign),
    "abs": _ufunc(np.abs),
    "sqrt": _ufunc(np.sqrt),
    "rsqrt": Operation(1, _rsqrt),
    "cbrt": _ufunc(np.cbrt),
    "square": _ufunc(np.square),
    "exp": _ufunc(np.exp),
    "exp2": _ufunc(np.exp2),
    "expm1": _ufunc(np.expm1),
    "log": _ufunc(np.log),
    "log1p": _ufunc(np.log1p),
    "tanh": _ufunc(np.tanh),
    "sin": _ufunc(np.sin),
    "cos": _ufunc(np.cos),
    "tan": _ufunc(np.tan),
    "logistic": Operation(1, _made(_logistic)),
    "floor": _ufunc(np.floor),
    "ceil": _ufunc(np.ceil),
    "is_finite": _ufunc(np.isfinite),
    "eq": _ufunc(np.equal),
    "ne": _ufunc(np.not_equal),
    "lt": _ufunc(np.less),
    "le": _ufunc(np.less_equal),
    "gt": _ufunc(np.greater),
    "ge": _ufunc(np.greater_equal),
    "and": _ufunc(np.bitwise_and),
    "or": _ufunc(np.bitwise_or),
    "xor": _ufunc(np.bitwise_xor),
    "not": _ufunc(np.invert),
    "clamp": Operation(3, _clamp),
    "select_n": Operation(3, _select),
    "round": Operation(1, _round, "method", lambda v: v in (0, _TO_EVEN)),
    "integer_pow": Operation(1, _integer_pow, "y", lambda v: abs(v) <= _MOST),
    "convert_element_type": Operation(1, _convert, "dtype", lambda v: v in DTYPES),
}
