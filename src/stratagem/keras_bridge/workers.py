"""What `fit` and saving do once a job, though every process calls them.

The chief shows the progress and writes the files. The processes draw the same random numbers when
Keras shuffles arrays, so that all see the same global batches.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import keras

from stratagem import variables
from stratagem.errors import PeerTimeoutError
from stratagem.keras_bridge.handover import Handover
from stratagem.keras_bridge.hooks import wrap
from stratagem.recovery import randomness

_log = logging.getLogger("stratagem")

_PATIENCE_SECONDS = 10.0  # after which a wait is said

# Callbacks that only write files or send messages, which one process does for all.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
_SAVED, _FAILED = b"saved", b"failed: "
_saves: dict[str, Any] = defaultdict(itertools.count)


def install() -> None:
    """Attaches the bridge to what saves models."""
    for name in ("save", "save_weights", "export"):
        wrap(keras.Model, name, _save)
    wrap(keras.saving, "save_model", _save)
    wrap(keras.saving, "save_weights", _save)


def prepare(strategy: Any, method: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of `fit`, `evaluate` or `predict` for this process of a job."""
    job = strategy.job
    if job is None:
        return args, kwargs
    job.together(lambda: _share_random(job))
    hands_over = method.__name__ == "fit" and job.may_change
    if job.is_chief and not hands_over:
        return args, kwargs
    bound = inspect.signature(method).bind_partial(None, *args, **kwargs)
    arguments = bound.arguments
    if hands_over:
        add_callback(arguments, Handover(job))
    if job.is_chief:
        return bound.args[1:], bound.kwargs
    if "verbose" in inspect.signature(method).parameters:
        arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, (list, tuple)):
        left_out = [c for c in callbacks if isinstance(c, _WRITERS)]
        arguments["callbacks"] = [c for c in callbacks if c not in left_out]
        if left_out:
            names = ", ".join(sorted({type(c).__name__ for c in left_out}))
            _log.info("%s: left to the chief, which writes for all processes", names)
    return bound.args[1:], bound.kwargs


def add_callback(arguments: dict[str, Any], callback: Any) -> None:
    """Adds a callback to the arguments of `fit`, however those were given."""
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(callback)
    else:
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        arguments["callbacks"] = [*(c for c in several if c is not None), callback]


def _share_random(job: Any) -> None:
    """Gives all processes the chief's state of the generators that Keras shuffles arrays with."""
    mine = json.dumps(randomness.get_state()).encode() if job.rank == 0 else b""
    chief = job.channel.stream("random state").from_first(mine, "the state of random numbers")
    if job.rank:
        randomness.set_state(json.loads(chief))


def _save(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    return _once(model, filepath, lambda: original(model, filepath, *args, **kwargs))


def _once(model: Any, filepath: Any, save: Any) -> Any:
    """The chief saves; the others wait until it has, and fail if it failed.

    The chief waits for nobody, so that a program that saves on the chief alone works too.
    """
    homes = [where for v in model.variables if (where := variables.home(v)) is not None]
    job = homes[0].strategy.job if homes else None
    if job is None:
        return save()
    # By the name of the file alone: processes may have folders of their own.
    path, name = str(filepath), Path(str(filepath)).name
    key = job.channel.key(f"save/{name}/{next(_saves[name])}")
    if not job.is_chief:
        return _wait_for_chief(job, path, key)
    try:
        result = save()
    except BaseException as error:
        job.channel.store.set(key, _FAILED + repr(error)[:1000].encode())
        raise
    job.channel.store.set(key, _SAVED)
    return result


def _wait_for_chief(job: Any, path: str, key: str) -> None:
    chief, me, seconds = job.channel.names[0], job.channel.names[job.rank], job.channel.seconds
    answer = job.channel.store.get(key, min(_PATIENCE_SECONDS, seconds))
    if answer is None and seconds > _PATIENCE_SECONDS:
        _log.warning(
            "Waiting for the chief, %s, to save %r, up to %g s (this is %s)",
            chief, path, seconds, me,
        )  # fmt: skip
        answer = job.channel.store.get(key, seconds - _PATIENCE_SECONDS)
    if answer is None:
        raise PeerTimeoutError(
            f"Expected the chief, {chief}, to save {path!r} within {job.channel.seconds:g} s, as "
            f"this process ({me}) was asked to. It did not. Save on every process, or on the "
            "chief alone; not on other processes alone."
        )
    if answer != _SAVED:
        raise RuntimeError(
            f"Expected the chief, {chief}, to save {path!r}. It failed: "
            f"{answer.removeprefix(_FAILED).decode()} (this is {me}, which writes nothing)"
        )
