"""When two function objects are the same step: a function defined anew at each call of another."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any


class Same:
    """An object by identity, as a key; it keeps the object alive, so that its id stays its own."""

    __slots__ = ("held",)

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def identity(fn: Callable[..., Any], outer: tuple[Any, ...] = ()) -> Hashable:
    """A key that is equal for functions of the same code that captured the same objects.

    Python makes a new object of a nested function at each call of the outer one. What such a
    function does is given by its code, its defaults and what it captured; captured functions are
    compared likewise. Anything that is no plain function is only the same as itself.

    Args:
        fn: the function.
        outer: the functions that captured it, which it may capture in turn.
    """
    if not isinstance(fn, types.FunctionType) or any(fn is one for one in outer):
        return Same(fn)
    try:
        captured = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # A cell that has nothing in it yet.
        return Same(fn)
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return (
        Same(fn.__code__),
        Same(fn.__globals__),
        tuple(Same(value) for value in defaults),
        tuple(identity(value, (*outer, fn)) for value in captured),
    )
