"""tf.function: one compiled program where that is possible, plain Python where input is read."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from stratagem.compat.dataset import Dataset
from stratagem.data import DistributedDataset
from stratagem.errors import OutOfRangeError, ReadInsideProgramError
from stratagem.function import Function as Compiled


class Function:
    """What `tf.function` makes of a function.

    Its Python code runs once for each set of shapes and of Python arguments, and becomes one
    program (stratagem.function). A function that reads a dataset, because it is given one or an
    iterator or because it turns out to call `next` on one, cannot become one program: it runs as
    Python, and each `strategy.run` in it is the compiled program.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.python_function = fn
        self._compiled = Compiled(fn)
        self._reads = False
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it; traces it first where it must.

        Raises:
            OutOfRangeError: an iterator that it reads has ended.
        """
        if self._reads or any(_is_input(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            return self._as_python(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except ReadInsideProgramError:  # Nothing was read yet: the trace stopped before.
            self._reads = True
            return self._as_python(*args, **kwargs)

    def _as_python(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.python_function(*args, **kwargs)
        except StopIteration as end:
            raise OutOfRangeError(
                "Expected another element of the dataset. Got its end, in "
                f"{self.python_function.__qualname__}. Catch tf.errors.OutOfRangeError, or loop "
                "as often as there are batches."
            ) from end

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program that a call with these arguments would run, not run."""
        return self._compiled.lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, (Iterator, Dataset, DistributedDataset))


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorates a function (tf.function).

    TensorFlow's options (input_signature, jit_compile, reduce_retracing, autograph and older
    names) are accepted and change nothing: every program is compiled by XLA, for the shapes that
    it is called with. There is no AutoGraph: an `if` or `while` on a tensor is an error.

    Raises:
        TypeError: an option that TensorFlow does not have.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(f"Expected options of tf.function, {sorted(_OPTIONS)}. Got {unknown}.")
    return functools.partial(function, **options) if func is None else Function(func)


_OPTIONS = {
    "autograph",
    "experimental_attributes",
    "experimental_autograph_options",
    "experimental_compile",
    "experimental_follow_type_hints",
    "experimental_implements",
    "experimental_relax_shapes",
    "input_signature",
    "jit_compile",
    "reduce_retracing",
}
