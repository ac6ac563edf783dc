"""Calls between processes, as `tf.distribute.experimental.rpc`, over the package's own transport.

Arguments and results are structures (dicts, lists, tuples) of tensors, numbers and texts. The
cluster's key is asked of both ends, as of all connections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from stratagem import config
from stratagem.cluster.keys import Key
from stratagem.transport.hub import Hub
from stratagem.transport.message import Message
from stratagem.transport.thread import HubThread

_SECONDS = 60.0
_THREADS = 4
_METHODS = "\x00methods"


class Server:
    """Functions that other processes call. Make it with `create`.

    Args:
        address: where it listens, "host:port".
    """

    def __init__(self, address: str):
        self._address = address
        self._functions: dict[str, Callable[..., Any]] = {}
        self._thread: HubThread | None = None
        self._pool = ThreadPoolExecutor(_THREADS, "stratagem-rpc")

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """A server that is not started.

        Args:
            rpc_layer: "grpc", as TensorFlow calls it; what is spoken is Stratagem's own.
            address: where it listens, "host:port".

        Raises:
            ValueError: another layer.
        """
        _check_layer(rpc_layer)
        return Server(address)

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Lets others call a function; a stratagem.function runs as its Python.

        Raises:
            ValueError: there is one of this name.
        """
        if method_name in self._functions:
            raise ValueError(
                f"method_name: expected a new name. Got {method_name!r}, which is registered. "
                "Register each function once."
            )
        self._functions[method_name] = func

    def start(self) -> None:
        """Begins to serve, in threads of its own."""
        if self._thread is None:
            key = Key.always(config.environment())
            self._thread = HubThread(lambda: Hub(f"rpc {self._address}", key), "stratagem-rpc")
            self._thread.do(
                lambda hub: hub.listen(self._address, self._serve), "a server to listen", 10.0
            )

    def close(self) -> None:
        """Ends it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.close()

    def _serve(self, request: Any) -> Message | None:
        if request.method == _METHODS:
            return Message("", {"methods": sorted(self._functions)}, ())
        function = self._functions.get(request.method)
        if function is None:
            raise ValueError(
                f"Expected a method of this server, one of {sorted(self._functions)}. Got "
                f"{request.method!r:.100}. Register it, or call another one."
            )
        args = unpack(request.fields.get("args"), [array.copy() for array in request.arrays])
        self._pool.submit(self._run, function, args, request)
        return None

    def _run(self, function: Callable[..., Any], args: Any, request: Any) -> None:
        thread = self._thread
        if thread is None:
            return
        try:
            arrays: list[np.ndarray] = []
            fields = {"value": pack(function(*args), arrays)}
        except Exception as error:  # it is the caller's
            failed = error
            thread.submit(lambda hub: request.fail(failed))
        else:
            thread.submit(lambda hub: request.answer(fields=fields, arrays=arrays))


class StatusOrResult:
    """What a call has come to; each method but `done` waits for it."""

    def __init__(self, future: Future[Any]):
        self._future = future

    def done(self) -> bool:
        """Whether it is there."""
        return self._future.done()

    def is_ok(self) -> bool:
        """Whether there is a value."""
        return self._future.exception() is None

    def get_error(self) -> BaseException | None:
        """Why there is none."""
        return self._future.exception()

    def get_value(self) -> Any:
        """The result, with NumPy arrays; raises what `get_error` gives."""
        return self._future.result()


class Client:
    """Calls functions of a server. Make it with `create`.

    Each function of the server is a method, which returns at once, and one with `_blocking` behind
    its name, which returns the value.

    Args:
        address: of the server.
        name: of this client.
        seconds: how long a call may take.
    """

    def __init__(self, address: str, name: str, seconds: float):
        self._seconds = seconds
        key = Key.always(config.environment())
        self._thread = HubThread(lambda: Hub(name or "rpc client", key), "stratagem-rpc-client")
        self._peer = self._thread.do(
            lambda hub: hub.connect(address, f"the server at {address}"), "a connection", 10.0
        )
        try:
            methods = self._post(_METHODS, {}, (), seconds).result().fields["methods"]
        except BaseException:
            self._thread.close()
            raise
        for method in methods:
            if not hasattr(self, method):
                setattr(self, method, functools.partial(self._call, method))
                setattr(self, f"{method}_blocking", functools.partial(self._wait, method))

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """A client that is connected.

        Args:
            rpc_layer: "grpc", as TensorFlow calls it.
            address: of the server, "host:port".
            name: of this client.
            timeout_in_ms: of each call; 0 for 60 s.

        Raises:
            ValueError: another layer.
            PeerTimeoutError: there is no server.
        """
        _check_layer(rpc_layer)
        return Client(address, name, timeout_in_ms / 1000 or _SECONDS)

    def call(
        self, method_name: str, args: Any = None, output_specs: Any = None, timeout_in_ms: int = 0
    ) -> StatusOrResult:
        """Calls a function of the server; returns at once.

        Args:
            method_name: of the function.
            args: a list or tuple of its arguments; one argument may stand alone.
            output_specs: for TensorFlow.
            timeout_in_ms: of this call; 0 for that of the client.
        """
        del output_specs
        args = [] if args is None else args if isinstance(args, (list, tuple)) else [args]
        arrays: list[np.ndarray] = []
        fields = {"args": pack(list(args), arrays)}
        found: Future[Any] = Future()

        def done(future: Future[Message]) -> None:
            try:
                answer = future.result()
                found.set_result(unpack(answer.fields["value"], [a.copy() for a in answer.arrays]))
            except Exception as error:
                found.set_exception(error)

        seconds = timeout_in_ms / 1000 or self._seconds
        self._post(method_name, fields, arrays, seconds).add_done_callback(done)
        return StatusOrResult(found)

    def close(self) -> None:
        """Ends the connection."""
        self._thread.close()

    def _call(self, method: str, *args: Any) -> StatusOrResult:
        return self.call(method, args)

    def _wait(self, method: str, *args: Any) -> Any:
        return self.call(method, args).get_value()

    def _post(
        self, method: str, fields: Mapping[str, Any], arrays: Any, seconds: float
    ) -> Future[Message]:
        future: Future[Message] = Future()

        def done(answer: Message | Exception) -> None:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        def work(hub: Any) -> None:
            try:
                self._peer.post(method, fields, arrays, seconds=seconds, done=done)
            except Exception as error:  # else who waits for the answer would wait for ever
                future.set_exception(error)

        self._thread.submit(work)
        return future


def pack(value: Any, arrays: list[np.ndarray]) -> Any:
    """A structure as plain data; its arrays are added to `arrays`, and named by their place."""
    if value is None or isinstance(value, (str, bool)):
        return ["plain", value]
    if isinstance(value, Mapping):
        return ["dict", [[str(key), pack(item, arrays)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [pack(item, arrays) for item in value]]
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(
            "Expected tensors, numbers, texts, and dicts, lists and tuples of them in a call. Got "
            f"{type(value).__name__}. Convert it."
        )
    arrays.append(np.array(array, order="C"))
    return ["array", len(arrays) - 1]


def unpack(data: Any, arrays: list[np.ndarray]) -> Any:
    """What `pack` was given; ValueError for anything else."""
    try:
        kind, content = data
        if kind == "plain":
            return content
        if kind == "array":
            return arrays[content]
        if kind == "dict":
            return {key: unpack(item, arrays) for key, item in content}
        if kind in ("list", "tuple"):
            items = [unpack(item, arrays) for item in content]
            return items if kind == "list" else tuple(items)
    except (TypeError, IndexError) as error:
        raise ValueError(f"Expected a structure of a call. Got {data!r:.100}.") from error
    raise ValueError(f"Expected a structure of a call. Got {data!r:.100}.")


def _check_layer(rpc_layer: str) -> None:
    if rpc_layer != "grpc":
        raise ValueError(
            f"rpc_layer: expected 'grpc', TensorFlow's only one. Got {rpc_layer!r}. What is spoken "
            "is Stratagem's own protocol in any case."
        )
