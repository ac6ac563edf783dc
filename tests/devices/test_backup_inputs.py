"""The position in the data is part of a backup, whatever the data is."""

from __future__ import annotations

import random

import grain
import keras
import numpy as np
import pytest
from keras import layers

import stratagem
from stratagem.callbacks import BackupAndRestore
from stratagem.errors import BackupMismatchError
from stratagem.recovery import randomness
from stratagem.recovery.position import Pass, decoded, encoded

ROWS = np.random.default_rng(0).normal(size=(28, 3)).astype("float32")
BATCH = 4


class Interrupted(Exception):
    """What ends a fit in these tests."""


class Interrupt(keras.callbacks.Callback):
    """Ends a fit after some steps."""

    def __init__(self, after: int):
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            raise Interrupted


class Seen(layers.Layer):
    """Notes the first value of each row it trains on, in a variable: the order of the data."""

    def build(self, shape):
        self.rows = self.add_weight((64, BATCH), trainable=False, name="rows")
        self.at = self.add_weight((), trainable=False, dtype="int32", name="at")

    def call(self, x, training=False):
        if training:
            here = keras.ops.arange(64)[:, None] == self.at.value
            self.rows.assign(keras.ops.where(here, x[None, :, 0], self.rows.value))
            self.at.assign(self.at + 1)
        return x


def make(seed: int):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), Seen(), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


class Batches(keras.utils.PyDataset):
    """The rows, in the order of its indices, which Keras shuffles by batches."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(ROWS))

    def __len__(self):
        return len(ROWS) // BATCH

    def __getitem__(self, i):
        rows = ROWS[self.order[i * BATCH :][:BATCH]]
        return rows, rows[:, :1]


class Reordered(Batches):
    """Shuffles itself after each epoch, on top of the order that it had."""

    def on_epoch_end(self):
        np.random.shuffle(self.order)

    def get_state(self):
        return {"order": self.order}

    def set_state(self, state):
        self.order = np.asarray(state["order"])


def pairs():
    for start in range(0, len(ROWS), BATCH):
        yield ROWS[start:][:BATCH], ROWS[start:][:BATCH, :1]


def drawn_at_random():
    while True:
        rows = ROWS[np.random.randint(0, len(ROWS), BATCH)]
        yield rows, rows[:, :1]


HERE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def grain_dataset():
    dataset = grain.MapDataset.source(ROWS).shuffle(seed=3).map(lambda r: (r, r[:1]))
    return dataset.to_iter_dataset(HERE).batch(BATCH)


def grain_stream():
    dataset = grain.MapDataset.source(ROWS).seed(3).shuffle().repeat().map(lambda r: (r, r[:1]))
    return dataset.to_iter_dataset(HERE).batch(BATCH)


def grain_loader():
    return grain.DataLoader(
        data_source=list(zip(ROWS, ROWS[:, :1], strict=True)),
        sampler=grain.samplers.IndexSampler(len(ROWS), shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
        read_options=HERE,
    )


def arrays():
    return ROWS


INPUTS = {
    "arrays": (arrays, {"y": ROWS[:, :1], "batch_size": BATCH}),
    "arrays shuffled by batch": (
        arrays,
        {"y": ROWS[:, :1], "batch_size": BATCH, "shuffle": "batch"},
    ),
    "PyDataset": (Batches, {"shuffle": True}),
    "PyDataset that reorders itself": (Reordered, {"shuffle": False}),
    "generator": (pairs, {"epochs": 1, "shuffle": False}),
    "generator of random batches": (drawn_at_random, {"steps_per_epoch": 7, "shuffle": False}),
    "Grain IterDataset": (grain_dataset, {"shuffle": False}),
    "Grain IterDataset without end": (grain_stream, {"steps_per_epoch": 7, "shuffle": False}),
    "Grain DataLoader": (grain_loader, {"shuffle": False}),
}


def fit(data, options, *callbacks, seed=1, strategy=None):
    options = {"epochs": 3, "verbose": 0, **options}
    strategy = strategy or stratagem.get_strategy()
    with strategy.scope():
        model = make(seed)
        model.fit(data(), callbacks=list(callbacks), **options)
    return model


def assert_same(got, want) -> None:
    for mine, theirs in zip(got.variables, want.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, of unknown lengths
@pytest.mark.parametrize("name", INPUTS)
def test_fit_goes_on_with_the_next_batch(tmp_path, name):
    data, options = INPUTS[name]
    whole = fit(data, options)
    rows = whole.layers[0].rows.numpy()
    assert int(whole.layers[0].at) == 7 * options.get("epochs", 3)
    # The backup of an epoch's last step is taken after the epoch, which 8 shows.
    for after in (3,) if "epochs" in options else (3, 8):
        directory = tmp_path / str(after)
        with pytest.raises(Interrupted):
            fit(data, options, BackupAndRestore(directory, 1), Interrupt(after))
        model = fit(data, options, BackupAndRestore(directory, 1), seed=1)
        np.testing.assert_array_equal(model.layers[0].rows.numpy(), rows)
        assert_same(model, whole)


def test_a_distributed_dataset(tmp_path):
    strategy = stratagem.OneDeviceStrategy("CPU:0")

    def distributed():
        return strategy.experimental_distribute_dataset(list(pairs()))

    options = {"shuffle": False}
    whole = fit(distributed, options, strategy=strategy)
    with pytest.raises(Interrupted):
        fit(distributed, options, BackupAndRestore(tmp_path, 1), Interrupt(10), strategy=strategy)
    model = fit(distributed, options, BackupAndRestore(tmp_path, 1), seed=2, strategy=strategy)
    assert_same(model, whole)


# One pass, without Keras.


def resumed(run: Pass, source) -> Pass:
    """As in another process, after it saved."""
    position, state = run.position(), run.random_state()
    random.seed(0)
    np.random.seed(0)
    randomness.set_state(state)
    return Pass(source, position, state)


def shuffled():
    for i in np.random.permutation(6).tolist():
        yield i + np.random.random()


def test_a_pass_is_begun_again_as_it_began():
    np.random.seed(4)
    whole = list(Pass(shuffled()))
    after = np.random.random()
    np.random.seed(4)
    run = Pass(shuffled())
    assert [next(run) for _ in range(2)] == whole[:2]
    run = resumed(run, shuffled())
    run = resumed(run, shuffled())  # nothing was drawn in between
    assert list(run) == whole[2:]
    assert np.random.random() == after


def test_looking_ahead_changes_nothing():
    np.random.seed(4)
    whole = list(Pass(shuffled()))
    np.random.seed(4)
    run = Pass(shuffled())
    got = []
    while not run.is_over():
        run = resumed(run, shuffled())
        got.append(next(run))
    assert got == whole
    assert not run.ended
    with pytest.raises(StopIteration):
        next(run)
    assert run.ended


def test_grains_iterator_is_asked_not_drawn(monkeypatch):
    dataset = grain_dataset()
    run = Pass(dataset)
    first = next(run)
    position = run.position()
    assert position["drawn"] == 1
    assert position["iterator"] is not None
    monkeypatch.setattr(Pass, "_drop", None)
    rest = list(Pass(dataset, position, randomness.get_state()))
    assert len(rest) == 6
    assert not np.array_equal(rest[0][0], first[0])


def test_data_that_is_shorter_than_it_was():
    run = Pass(range(9))
    for _ in range(5):
        next(run)
    with pytest.raises(BackupMismatchError, match=r"more than 5 batches.* Got 3\. .*same data"):
        next(resumed(run, range(3)))


@pytest.mark.parametrize(
    "state", [b"\x00\xff", {"a": [1, {"b": b"x"}]}, 3, None, "text", [1.5, True]]
)
def test_states_of_iterators_go_through_json(state):
    assert decoded(encoded(state)) == state


def test_numpy_in_the_state_of_an_iterator():
    assert encoded({"i": np.int64(3), "a": np.arange(2)}) == {"i": 3, "a": [0, 1]}


def test_the_random_state_of_the_process_comes_back():
    keras.utils.set_random_seed(3)
    keras.random.normal(())
    np.random.normal()  # leaves half of a pair behind
    state = randomness.get_state()

    def draw():
        return random.random(), np.random.normal(), float(keras.random.normal(()))

    first = draw()
    keras.utils.set_random_seed(4)
    randomness.set_state(state)
    assert draw() == first
