"""`stratagem.function`: a cross-replica function becomes one compiled program."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from stratagem import context
from stratagem.strategies import Strategy


class Function:
    """A function that contains `strategy.run` and `strategy.reduce`, compiled as a whole.

    It is traced once for each set of argument shapes; PerReplica arguments stay distributed. What
    `run` and `reduce` communicate travels in the program's fused all-reduce. Called inside another
    traced function it is simply part of it.
    """

    def __init__(self, fn: Callable[..., Any], strategy: Strategy | None = None):
        self._fn = fn
        self._strategy = strategy
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program; traces it first where it must."""
        if context.current().trace is not None:
            return self._fn(*args, **kwargs)
        return self._with_strategy(lambda s: s.call_function(self._fn, args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program that a call with these arguments would run, not run: to read or to count."""
        return self._with_strategy(lambda s: s.lower_function(self._fn, args, kwargs))

    def _with_strategy(self, use: Callable[[Strategy], Any]) -> Any:
        strategy = context.get_strategy() if self._strategy is None else self._strategy
        try:
            return use(strategy)
        except context.StrategyFound as found:
            # Called outside any scope: the function itself names its strategy.
            self._strategy = found.strategy
            return use(found.strategy)

    @property
    def python_function(self) -> Callable[..., Any]:
        """The Python function."""
        return self._fn

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def function(fn: Callable[..., Any] | None = None, *, strategy: Strategy | None = None) -> Any:
    """Decorates a function so that it runs as one compiled program (tf.function's part here).

    Args:
        fn: Python over tensors, variables, `strategy.run`, `strategy.reduce`, `strategy.gather`.
        strategy: whose program it is; None takes the current strategy, or the one whose `run`
            the function calls.

    Returns:
        A callable with fn's signature. Results that `run` made are PerReplica, those of `reduce`
        and `gather` are tensors.
    """
    if fn is None:
        return functools.partial(Function, strategy=strategy)
    return Function(fn, strategy)
