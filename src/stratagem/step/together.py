"""A step of several processes, done again where they change; see `cluster/lockstep.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def in_step(executor: Any, strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `Executor.__call__` does, on a strategy of several processes."""
    last: Any = None
    if strategy.job.is_waiting:
        raise RuntimeError(
            "Expected this process, which replaces a lost one, to get the state of the training "
            "from the others before its first step: in a call of fit, or by "
            "stratagem.train.Backup.restore() in a loop of its own. Got strategy.run or a "
            "stratagem.function before. Restore first; without a Backup leave out "
            "--wait-for-replacement, and the others go on without this process."
        )

    def work() -> Any:
        nonlocal last
        shared = executor.replica is None
        compiled, values = executor.prepare(fn, *strategy.join_arguments((args, kwargs), shared))
        given, kept = compiled.state()
        packed = compiled.pack(values)
        results, state = strategy.execute(compiled.function, given, kept, packed)
        compiled.check(results)
        compiled.store(state)
        last = compiled, given, state
        return compiled.unpack(results)

    def again(_: Any) -> None:
        compiled, before, after = last
        now = [v.components if c else v._value for v, c in compiled.given]
        compiled.store(before)
        work()
        # What the program has changed since then stays as it is.
        for (variable, component), value, old in zip(compiled.given, now, after, strict=True):
            if value is not old and component:
                variable.components = value
            elif value is not old:
                variable._value = value

    return strategy.in_step(work, again, f"run({getattr(fn, '__qualname__', fn)})")
