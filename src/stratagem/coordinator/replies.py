"""What a worker answers to closures."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from stratagem.errors import RemoteError
from stratagem.transport import several
from stratagem.transport.message import Message

Reply = Callable[[Message], None]


class Replies:
    """The answers to the closures of one request.

    Args:
        request: of the coordinator.
        answer: answers a request.
    """

    def __init__(self, request: Any, answer: Callable[[Any, Message], None]):
        self._request, self._answer = request, answer
        self._left = len(request.fields["each"])
        self._each: list[Message] = [Message("", {})] * self._left

    def put(self, number: int, answer: Message) -> None:
        """One more is there; the last one makes them leave."""
        self._each[number] = answer
        self._left -= 1
        if not self._left:
            each, arrays = several.join((one.fields, one.arrays) for one in self._each)
            self._answer(self._request, Message("ran", {"each": each}, tuple(arrays)))


def outcome(what: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Message:
    """What became of a closure, with what `Dispatcher` wants to know of that."""
    return Message("ran", {"outcome": what, **fields}, tuple(arrays))


def failure(error: Exception) -> Message:
    """A closure's own error, with where it was raised."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = as_array(cloudpickle.dumps(error))
    except Exception:  # an exception may hold anything
        pickled = as_array(b"")
    return outcome(
        "error", arrays=(pickled,), kind=type(error).__name__, text=str(error), traceback=text
    )


def error_of(
    answer: Message, where: str, what: str = "The function that was scheduled"
) -> BaseException:
    """The error of a `failure`, as it was raised on the worker, with what it was raised by."""
    fields = answer.fields
    error: BaseException
    try:
        error = cloudpickle.loads(answer.arrays[0].tobytes())
    except Exception:  # an exception may hold anything
        error = RemoteError("a worker", "run", fields["kind"], fields["text"])
    error.add_note("On the worker:\n" + fields["traceback"])
    error.add_note(f"{what}: {where}")
    return error


def as_array(data: bytes) -> np.ndarray:
    """Bytes, to be sent."""
    return np.frombuffer(data, np.uint8)
