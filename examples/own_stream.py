"""A stream of one's own: batches served by a process of the user's, read by the workers over RPC.

    stratagem run --workers 2 --ps 1 examples/own_stream.py

Here a thread of the coordinator serves; it could be a message queue or a log. Each worker calls the
dataset function, which connects and asks for batch after batch, so a batch goes to whichever worker
asks first, once. The end of the stream is an answer, not an error: then `fetch`ed values say so,
and `join` returns. (A stream is not accounted for: what a killed worker had fetched is gone. For
each row exactly once, give `fit` a finite dataset.)
"""
# start with: stratagem run --workers 2 --ps 1

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener

import stratagem

# In a worker or ps task this line serves the job and never returns.
strategy = stratagem.ParameterServerStrategy()

import keras
import numpy as np

BATCHES, ROWS = 200, 64
SLOPE = np.array([[1.0], [-2.0], [0.5]], "float32")


def events() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What happens in the world: x `[64, 3]`, y `[64, 1]`."""
    rng = np.random.default_rng(0)
    for _ in range(BATCHES):
        x = rng.normal(size=(ROWS, 3)).astype("float32")
        yield x, x @ SLOPE


class Stream:
    """Serves an iterator on loopback to whoever knows the key; one thread for each reader."""

    def __init__(self, batches: Iterator[tuple[np.ndarray, np.ndarray]]):
        self.key = secrets.token_bytes(32)
        self._batches, self._lock = batches, threading.Lock()
        self._listener = Listener(("127.0.0.1", 0), authkey=self.key)
        self.address = self._listener.address
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection) -> None:
        with connection:
            while True:
                try:
                    connection.recv_bytes()  # "the next one, please"
                except EOFError:
                    return
                with self._lock:
                    batch = next(self._batches, None)
                if batch is None:
                    connection.send_bytes(b"")
                    return
                for array in batch:
                    connection.send_bytes(array.tobytes())


def dataset_function(address: tuple[str, int], key: bytes):
    """What each worker calls; it is sent there, so it holds all that it needs."""

    def read():
        with Client(address, authkey=key) as connection:
            while True:
                connection.send_bytes(b"next")
                x = connection.recv_bytes()
                if not x:
                    return
                y = connection.recv_bytes()
                yield (
                    np.frombuffer(x, "float32").reshape(-1, 3),
                    np.frombuffer(y, "float32").reshape(-1, 1),
                )

    return read


coordinator = stratagem.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def replica_step(x, y):
    with stratagem.GradientTape() as tape:
        loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def step(iterator):
    return strategy.run(replica_step, args=next(iterator))


stream = Stream(events())
iterator = iter(coordinator.create_per_worker_dataset(dataset_function(stream.address, stream.key)))
losses = []
while not losses or not losses[-1].ended:
    losses += [coordinator.schedule(step, args=(iterator,)) for _ in range(10)]
    coordinator.join()

values = [float(loss.fetch()) for loss in losses if not loss.ended]
print(f"{len(values)} steps, loss {values[0]:.3f} at first, {values[-1]:.5f} in the end")
print("slope:", np.round(np.ravel(model.layers[-1].kernel.numpy()), 2), "wanted:", SLOPE.ravel())
