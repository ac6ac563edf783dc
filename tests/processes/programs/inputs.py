"""Training on every kind of input: the losses do not depend on the number of workers.

The test imports `curves`; as a program its arguments are a directory of files, and the inputs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

ROWS, BATCH, EPOCHS = 50, 12, 2


def write_files(directory: Path) -> None:
    """Rows in five files of different lengths, one of them empty."""
    import numpy as np

    x, y = arrays()
    ends = np.cumsum([0, 10, 12, 0, 16, 12])
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        np.savez(directory / f"{i}.npz", x=x[start:end], y=y[start:end])


def arrays() -> Any:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, np.tanh(x.sum(axis=1, keepdims=True)).astype("float32")


ALL = (
    "arrays",
    "batches",
    "grain, each reads all",
    "grain, each reads its own",
    "files",
    "files by row",
    "few files at once",
    "function",
)


def curves(strategy: Any, directory: str, names: Any = ALL) -> dict[str, Any]:
    """Loss of each epoch, and the last weights, for kinds of input."""
    import grain
    import keras
    import numpy as np

    from stratagem import data

    x, y = arrays()

    def read(path: str) -> Any:
        with np.load(path) as rows:
            return rows["x"], rows["y"]

    def files(**kwargs: Any) -> Any:
        paths = str(Path(directory) / "*.npz")
        return data.from_files(paths, read, BATCH, shuffle_seed=1, **kwargs)

    def rows() -> Any:
        return grain.MapDataset.source(list(zip(x, y, strict=True))).seed(3).shuffle()

    def function(context: Any) -> Any:
        own = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        size = context.get_per_replica_batch_size(BATCH)
        return data.batches((x[own], y[own]), size)

    inputs = {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
        "batches": lambda: {"x": data.batches((x, y), BATCH, shuffle_seed=1)},
        "grain, each reads all": lambda: {"x": rows().batch(BATCH), "shuffle": False},
        "grain, each reads its own": lambda: {"x": data.batches(rows(), BATCH)},
        "files": lambda: {"x": files()},
        "files by row": lambda: {
            "x": data.with_options(files(), auto_shard_policy=data.AutoShardPolicy.DATA)
        },
        "few files at once": lambda: {"x": files(interleave=4)},
        "function": lambda: {"x": strategy.distribute_datasets_from_function(function)},
    }
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.2), "mse")
    initial = model.get_weights()
    result = {}
    for name in names:
        keras.utils.set_random_seed(7)  # of the shuffle of arrays
        model.set_weights(initial)
        history = model.fit(**inputs[name](), epochs=EPOCHS, verbose=0).history
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        result[name] = {"losses": history["loss"], "weights": weights.tolist()}
    return result


if __name__ == "__main__":
    together = stratagem.MultiWorkerMirroredStrategy()

    from jobs import report

    report(curves(together, sys.argv[1], sys.argv[2:]))
