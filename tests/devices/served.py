"""Steps in parts, run without processes: servers as a dictionary, a worker as a function."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import msgpack
import numpy as np

from stratagem import context
from stratagem.parameter_server import block
from stratagem.parameter_server.bags import Bagged
from stratagem.parameter_server.whole import program_of
from stratagem.step import tape
from stratagem.step.apart import divide
from stratagem.step.flow import Home
from stratagem.step.lower import evaluate
from stratagem.step.parts import Parts
from stratagem.step.runner import Runner
from stratagem.step.trace import Facts, Program, RowClass, trace


def strategy() -> Any:
    return types.SimpleNamespace(
        num_replicas_in_sync=1, central=False, served=True, cross_device_ops=None, spans=False,
        keeps_state=False, job=None, late_gradients="keep",
    )  # fmt: skip


def traced(fn: Any, *arguments: Any) -> Program:
    """The program of one call, gradients resolved."""
    own = strategy()
    frame = context.Frame(own, replica=object())
    specs = [jax.ShapeDtypeStruct(np.shape(a), jnp.asarray(a).dtype) for a in arguments]

    def finish(program: Program, facts: Facts) -> Program:
        return program if facts.dirty else tape.resolve(program, facts)

    (program,) = trace(fn, own, frame, [(RowClass(), specs)], Facts(), finish)
    return program


class Job:
    """One step function on a worker and servers.

    Args:
        fn: step of arrays.
        arguments: of its first call.
        local: variables that the caller keeps.
        sharded: paths (their ends) of variables whose rows are on two servers.
        servers: on how many servers the worker is told that tables are; 0: it is told nothing.
    """

    def __init__(
        self, fn: Any, *arguments: Any, local: Any = (), sharded: Any = (), servers: int = 0
    ):  # fmt: skip
        self.servers = servers
        self.program = traced(fn, *arguments)
        self.variables = {i: v for i, v in enumerate(self.program.variables)}
        self.numbers = {id(v): i for i, v in self.variables.items()}
        shapes = [tuple(v.shape) for v in self.program.variables if v.path.endswith(tuple(sharded))]
        self.split = {i for i, v in self.variables.items() if sharded and tuple(v.shape) in shapes}
        self.parts = divide(self.program, self.home, local)
        data, blobs = self.parts.to_wire()
        self.sent = Parts.from_wire(msgpack.unpackb(msgpack.packb(data)), blobs)
        self.runner = Runner(self.sent)
        self.units = {
            u.uid: (u.vids, program_of(msgpack.unpackb(msgpack.packb(u.program))))
            for u in self.parts.units
        }
        self.state = {i: np.array(v.numpy()) for i, v in self.variables.items()}
        self.local = [np.array(v.numpy()) for v in local]
        self.plain = {i: v.copy() for i, v in self.state.items()}
        self._whole = jax.jit(functools.partial(evaluate, self.program.jaxpr))
        self.closures = 0

    def home(self, variable: Any) -> Home:
        number = self.numbers[id(variable)]
        return Home(number, "halves" if number in self.split else "one", number in self.split)

    def __call__(self, *arguments: Any) -> Any:
        return self.finish(self.start(*arguments))

    def start(self, *arguments: Any) -> Any:
        """A closure up to its push."""
        given = [np.asarray(self.closures, g.dtype) for g in self.sent.given]
        self.closures += 1
        servers = [self.servers] * len(self.sent.tables) if self.servers else ()
        wanted = self.runner.prepare(arguments, given, servers)
        rows = []
        for table, one in zip(self.sent.tables, wanted, strict=True):
            found = self.state[table.vid][one.ids]
            if one.bags is not None:
                out = np.empty((len(one.bags), *found.shape[1:]), found.dtype)
                rows.append(one.bags.sums(self.state[table.vid], out, one.ids))
                continue
            room = np.full((one.padded - len(found), *found.shape[1:]), np.nan, found.dtype)
            rows.append(np.concatenate([found, room]))  # nothing may depend on what is behind
        whole = [self.state[vid].copy() for vid in self.sent.whole]
        results, self.local, handed = self.runner.compute(
            whole, rows, wanted, arguments, given, self.local
        )
        return results, self.runner.items(handed, wanted)

    def finish(self, started: Any) -> Any:
        """The push, and the closure's result."""
        results, items = started
        for item in items:
            item["handed"] = [
                (kind, value.by_row(len(item["rows"])) if isinstance(value, Bagged) else value)
                for kind, value in item["handed"]
            ]
            vids, program = self.units[item["uid"]]
            state = [self.state[vid] for vid in vids]
            arrays = [value for _, value in item["handed"]]
            if vids[0] in self.split:
                self._halves(program, state, item)
            else:
                _update(program, state, arrays, item["rows"])
        return self.parts.unpack(results)

    def _halves(self, program: Any, state: Any, item: Any) -> None:
        middle = (len(state[0]) + 1) // 2
        for start, stop in ((0, middle), (middle, len(state[0]))):
            ids = item["rows"]
            part = slice(start, stop)
            if ids is not None:
                low, high = np.searchsorted(ids, [start, stop])
                part, ids = slice(low, high), ids[low:high] - start
            own = [value[part] if kind == "rows" else value for kind, value in item["handed"]]
            _update(program, [s[start:stop] for s in state], own, ids)

    def undivided(self, *arguments: Any) -> Any:
        """The step as one program, on state of its own."""
        outs = self._whole([*self.plain.values(), *arguments])
        count = self.program.num_outputs
        for i, value in zip(self.program.written, outs[count:], strict=True):
            self.plain[i] = np.asarray(value)
        return self.parts.unpack(outs[:count])

    def value(self, variable: Any) -> np.ndarray:
        return self.state[self.numbers[id(variable)]]


def _update(program: Any, state: Any, handed: Any, rows: Any) -> None:
    """As a server does it."""
    if rows is None:
        program.update(state, handed)
    else:
        block.update(program, [block.Block(s) for s in state], rows, handed)


def train_step(*pairs: Any) -> Any:
    """A step of models, each with its optimizer, on one batch; of one program and one gradient."""

    def step(x: Any, y: Any) -> Any:
        losses = []
        with tape.GradientTape() as recorded:
            for model, optimizer in pairs:
                value = jnp.mean(keras.losses.mean_squared_error(y, model(x, training=True)))
                losses.append(optimizer.scale_loss(value + sum(model.losses)))
        grads = recorded.gradient(losses, [model.trainable_variables for model, _ in pairs])
        for (model, optimizer), own in zip(pairs, grads, strict=True):
            optimizer.apply(own, model.trainable_variables)
        return jnp.stack(losses)

    for model, optimizer in pairs:
        optimizer.build(model.trainable_variables)
    return step


def compare(job: Job, batches: Any, rtol: float = 1e-5) -> None:
    """Steps in parts, and the same whole: results and all variables agree."""
    for batch in batches:
        got, want = job(*batch), job.undivided(*batch)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)
    for number, variable in job.variables.items():
        np.testing.assert_allclose(
            job.state[number].astype("float64"), job.plain[number].astype("float64"),
            rtol=rtol, atol=1e-6, err_msg=variable.path,
        )  # fmt: skip
