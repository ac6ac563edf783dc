"""Which worker is given which rows, on two workers of one device. Argument: directory of files."""

from __future__ import annotations

import sys
from pathlib import Path

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

import gc
import logging
import threading
from typing import Any

import keras
import numpy as np
from jobs import report

from stratagem import data
from stratagem.data import AutoShardPolicy, InputOptions, InputReplicationMode

strategy = stratagem.MultiWorkerMirroredStrategy()
RANK = strategy.cluster_resolver.task_id
FILES = sorted(Path(sys.argv[1]).glob("*.npy"))
distribute = strategy.experimental_distribute_dataset
from_function = strategy.distribute_datasets_from_function


def parts(element: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(element)]


def reads(dataset: Any) -> list[Any]:
    """This worker's rows of each step."""
    return [parts(element)[0] for element in dataset]


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def policies() -> dict[str, Any]:
    numbers = data.batches(np.arange(14, dtype="int32"), 8)
    off = distribute(data.with_options(numbers, auto_shard_policy=AutoShardPolicy.OFF))
    by_row = distribute(data.with_options(numbers, auto_shard_policy=AutoShardPolicy.DATA))
    uneven = data.with_options([np.arange(5)] * 2, auto_shard_policy=AutoShardPolicy.OFF)
    return {
        "off": reads(off),
        "off pieces": reads(distribute(uneven)),
        "data": reads(by_row),
        "generator": reads(distribute(np.arange(i, i + 3) for i in range(2))),
        "described": [str(one) for one in by_row.describe()],
        "off described": off.describe()[0].rows,
        "spec": str(by_row.element_spec),
        "HINT": error_of(
            lambda: distribute(data.with_options(numbers, auto_shard_policy=AutoShardPolicy.HINT))
        ),
        "FILE of arrays": error_of(
            lambda: distribute(data.with_options(numbers, auto_shard_policy=AutoShardPolicy.FILE))
        ),
    }


def functions() -> dict[str, Any]:
    def only_chief(context: Any) -> Any:
        return [{"x": np.int32([[1, 2]]), "y": (np.int32([3]),)}] if RANK == 0 else []

    def failing(context: Any) -> Any:
        def elements() -> Any:
            yield np.arange(2)
            if RANK == 1:
                raise OSError("the disk is gone")
            yield np.arange(3)

        return elements

    def other_kind(context: Any) -> Any:
        return [np.float32([1])] if RANK == 0 else [(np.int32([1]),)]

    def scalars(context: Any) -> Any:
        return range(3 if RANK == 0 else 2)

    def odd_structure(context: Any) -> Any:
        return [data.TensorSpec((1,), np.dtype("int32"))] if RANK else [np.int32([1])]

    failed = iter(from_function(failing))
    first = parts(next(failed))
    per_replica = InputOptions(None, InputReplicationMode.PER_REPLICA)
    dataset = from_function(only_chief)
    return {
        "only chief": [
            [np.shape(strategy.experimental_local_results(x)[0]) for x in (e["x"], e["y"][0])]
            for e in dataset
        ],
        "again": len(list(dataset)),
        "before the failure": first,
        "failure": error_of(lambda: next(failed)),
        "other kind": error_of(lambda: list(from_function(other_kind))),
        "no array": error_of(lambda: list(from_function(odd_structure))),
        "empty": error_of(lambda: list(from_function(lambda context: []))),
        "scalars": reads(from_function(scalars)),
        "per replica": reads(
            from_function(
                lambda c: [np.int32([c.input_pipeline_id, c.num_input_pipelines])], per_replica
            )
        ),
        "redistribute": error_of(lambda: iter(dataset).redistribute(strategy.mesh, strategy.job)),
    }


def same_batches() -> dict[str, Any]:
    own = [np.arange(4) + RANK]
    epochs = OwnSecondEpoch()
    return {
        "own second epoch": [error_of(lambda: _fit(epochs)), epochs.epoch],
        "own data": error_of(lambda: list(distribute(own))),
        "own order": error_of(
            lambda: list(distribute(data.batches(Counted(12), 4, shuffle_seed=RANK)))
        ),
        "same": reads(distribute([np.arange(4)])),
    }


class OwnSecondEpoch(keras.utils.PyDataset):
    """The same data on all processes in its first epoch only."""

    epoch = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        x = np.full((4, 1), index + RANK * self.epoch, "float32")
        return x, x

    def on_epoch_end(self) -> None:
        self.epoch += 1


def _fit(epochs: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(epochs, epochs=2, shuffle=False, verbose=0)


class Counted:
    """Rows by number, which counts what is read."""

    def __init__(self, rows: int):
        self.rows = rows
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Any:
        self.seen.append(number)
        return np.int32(number)


def by_number() -> dict[str, Any]:
    import grain

    counted = Counted(11)
    plain = reads(distribute(data.batches(counted, 4)))
    seen: list[int] = []
    mapped = grain.MapDataset.range(11).seed(1).shuffle().map(lambda x: seen.append(x) or x)
    shuffled = reads(distribute(data.batches(mapped, 4)))
    return {"plain": plain, "read": counted.seen, "grain": shuffled, "grain read": seen}


def files() -> dict[str, Any]:
    opened: list[str] = []

    def reader(path: str) -> Any:
        opened.append(Path(path).name)
        rows = np.load(path)
        return (rows[i : i + 2] for i in range(0, len(rows), 2))

    def make(**kwargs: Any) -> Any:
        return data.from_files(FILES, reader, 6, **kwargs)

    def with_policy(policy: AutoShardPolicy, files: Any) -> Any:
        return distribute(data.with_options(files, auto_shard_policy=policy))

    by_file = distribute(make())
    own = reads(by_file)
    own_files = sorted(set(opened))
    two = [reads(dataset) for dataset in [distribute(make(shuffle_seed=3))] for _ in range(2)]
    one = data.from_files(FILES[:1], reader, 6)
    iterator = iter(by_file)
    first = parts(next(iterator))[0]
    state = iterator.get_state()
    iterator.redistribute(strategy.mesh, strategy.job, again=True)
    repeated = parts(next(iterator))[0]
    rest = reads(iterator)
    resumed = iter(distribute(make()))
    resumed.set_state(state)
    broken = data.from_files(FILES, np.load if RANK == 0 else _broken, 6)
    return {
        "own": own,
        "own files": own_files,
        "policy": by_file.describe()[0].policy.name,
        "rows": by_file.describe()[0].rows,
        "by row": reads(with_policy(AutoShardPolicy.DATA, make())),
        "shuffled": two,
        "one file": [reads(distribute(one)), distribute(one).describe()[0].policy.name],
        "first": [first, repeated],
        "rest": rest,
        "resumed": reads(resumed),
        "spec": str(by_file.element_spec),
        "FILE": error_of(lambda: with_policy(AutoShardPolicy.FILE, one)),
        "interleave": error_of(lambda: with_policy(AutoShardPolicy.FILE, make(interleave=1))),
        "broken": error_of(lambda: list(distribute(broken))),
        "other files": error_of(
            lambda: list(distribute(data.from_files(FILES[RANK : RANK + 3], np.load, 6)))
        ),
        "empty": error_of(
            lambda: list(distribute(data.from_files(FILES, lambda path: np.zeros((0, 1)), 6)))
        ),
    }


def _broken(path: str) -> Any:
    raise OSError(f"cannot read {Path(path).name}")


def positions() -> dict[str, Any]:
    numbers = data.batches(np.arange(20), 4, shuffle_seed=5)
    dataset = distribute(numbers)
    list(dataset)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    lost = parts(next(iterator))[0]
    iterator.redistribute(strategy.mesh, strategy.job, again=True)
    again = parts(next(iterator))[0]
    rest = [again, *reads(iterator)]
    resumed = iter(distribute(data.batches(np.arange(20), 4, shuffle_seed=5)))
    resumed.set_state(state)
    dealt = from_function(lambda context: [np.int32([i]) for i in range(4)])
    iterator = iter(dealt)
    next(iterator)
    state = iterator.get_state()
    next(iterator)
    iterator.set_state(state)
    other = {"step": 1, "source": {**state["source"], "workers": 3}}
    return {
        "lost": [lost, again],
        "rest": [rest, reads(resumed)],
        "dealt": reads(iterator),
        "other workers": error_of(lambda: iter(dealt).set_state(other)),
    }


def threads() -> dict[str, Any]:
    """A pass that is left before its end leaves no thread."""

    def alive() -> int:
        gc.collect()
        return sum(t.name == "stratagem-input" for t in threading.enumerate())

    dataset = from_function(lambda context: [np.int32([i]) for i in range(100)])
    for _ in dataset:
        break
    left = alive()
    iterator = iter(dataset)
    next(iterator)
    running = alive()
    iterator.close()
    return {"left": left, "running": running, "closed": alive(), "after": len(list(iterator))}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


lines = Lines()
logging.getLogger("stratagem").addHandler(lines)
logging.getLogger("stratagem").setLevel(logging.INFO)
result = {
    one.__name__: one()
    for one in (policies, functions, same_batches, by_number, files, positions, threads)
}
# What is open at the end of the program does not keep it.
left_open = iter(from_function(lambda context: [np.int32([i]) for i in range(100)]))
next(left_open)
report({**result, "lines": [line for line in lines.lines if line.startswith("Input:")]})
