"""`fit` is interrupted; another `fit` with the same directory ends where an undisturbed one does.

Bit for bit: the digits, shuffled, a model with dropout and batch normalisation, Adam.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_digits

import stratagem
from stratagem.callbacks import BackupAndRestore
from stratagem.errors import BackupError, BackupMismatchError

DIGITS = load_digits()
X = (DIGITS.data[:200] / 16).astype("float32")
Y = DIGITS.target[:200]
BATCH, STEPS, EPOCHS = 32, 7, 3
STRATEGIES = {
    "default": contextlib.nullcontext,
    "one device": lambda: one_device().scope(),
    "two replicas": lambda: mirrored(2).scope(),
    "three replicas": lambda: mirrored(3).scope(),
}


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


class Positions(keras.callbacks.Callback):
    """Which epochs and batches a fit trained."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append((self._epoch, batch))


@functools.cache
def one_device():
    return stratagem.OneDeviceStrategy("CPU:1")


@functools.cache
def mirrored(replicas: int):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def make(built: bool = True, width: int = 16, optimizer=None, **compiled):
    model = keras.Sequential(
        [keras.Input((64,))] * built
        + [
            layers.Dense(width, "relu"),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], **compiled}
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **compiled)
    return model


@functools.cache
def made(name: str = "default"):
    """A model of the strategy, and all its values at the start. Compiled once, to save time."""
    keras.utils.set_random_seed(1)
    with STRATEGIES[name]():
        return warm(make())


def warm(model):
    """A first fit draws a batch more than others, to build the metrics."""
    model.fit(X[:2], Y[:2], verbose=0)
    return model, values(model)


def start(name: str = "default", model=None, restart: bool = False):
    """The model as a new process has it; after a restart, as a backup must not leave it."""
    if model is None:
        model, initial = made(name)
        reset(model, [value + restart for value in initial])
    keras.utils.set_random_seed(99 if restart else 1)
    return model


def reset(model, initial) -> None:
    for variable, value in zip(variables(model), initial, strict=True):
        variable.assign(value)


def fit(*callbacks, strategy="default", model=None, restart=False, **options):
    """A fit; returns the values that the model ends with, and the history."""
    options = {"epochs": EPOCHS, "verbose": 0, "batch_size": BATCH, **options}
    with STRATEGIES[strategy]():
        model = start(strategy, model and model(), restart)
        history = model.fit(X, Y, callbacks=list(callbacks), **options)
    return values(model), history


def variables(model) -> list:
    return [*model.variables, *model.optimizer.variables]


def values(model) -> list[np.ndarray]:
    return [v.numpy() for v in variables(model)]


def assert_same(got, want) -> None:
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def interrupted(directory, after: int, *callbacks, save_freq=1, keep: int = 2, **options) -> None:
    backup = BackupAndRestore(directory, save_freq, keep=keep)
    with pytest.raises(Interrupted):
        fit(backup, *callbacks, Interrupt(after), **options)


@functools.cache
def undisturbed(strategy: str = "default"):
    """A fit without interruption."""
    return fit(strategy=strategy)


points = np.random.default_rng(5).permutation(np.arange(2, STEPS * EPOCHS))
CASES = [
    ("default", int(points[0]), 1),
    ("default", STEPS, 1),  # at an epoch's last step
    ("default", STEPS + 1, 3),
    ("default", int(points[1]), "epoch"),
    ("one device", int(points[2]), 1),
    ("two replicas", int(points[3]), 1),
    ("two replicas", int(points[4]) + 4, 4),
    ("two replicas", 2 * STEPS + 1, "epoch"),
]


@pytest.mark.parametrize(("strategy", "after", "save_freq"), CASES)
def test_it_goes_on_bit_for_bit(tmp_path, strategy, after, save_freq):
    interrupted(tmp_path / "b", after, save_freq=save_freq, strategy=strategy)
    got, history = fit(BackupAndRestore(tmp_path / "b"), strategy=strategy, restart=True)
    whole, whole_history = undisturbed(strategy)
    assert_same(got, whole)
    first = history.epoch[0]
    assert history.epoch == list(range(first, EPOCHS))
    for name, logs in history.history.items():
        assert logs == whole_history.history[name][first:]
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("after", range(2, STEPS * EPOCHS + 1))
def test_it_goes_on_bit_for_bit_from_every_step(tmp_path, strategy, after):
    interrupted(tmp_path, after, save_freq=1, strategy=strategy)
    got, _ = fit(BackupAndRestore(tmp_path), strategy=strategy, restart=True)
    assert_same(got, undisturbed(strategy)[0])


def test_no_step_is_made_twice_and_none_is_left_out(tmp_path):
    before, after = Positions(), Positions()
    # The interruption comes before the backup of its own step.
    interrupted(tmp_path, 11, before)
    fit(BackupAndRestore(tmp_path), after, restart=True)
    every = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(STEPS)]
    assert before.seen[:-1] + after.seen == every


def test_it_is_interrupted_twice(tmp_path):
    interrupted(tmp_path, 4)
    interrupted(tmp_path, 9, restart=True)
    got, _ = fit(BackupAndRestore(tmp_path), restart=True)
    assert_same(got, undisturbed()[0])


def test_row_63_an_interruption_in_epoch_3_of_5(tmp_path):
    interrupted(tmp_path, 3 * STEPS + 1, save_freq="epoch", epochs=5)
    _, history = fit(BackupAndRestore(tmp_path), epochs=5)
    assert history.epoch == [3, 4]


def test_r58_an_unbuilt_model_interrupted_at_the_start_of_epoch_4_of_10(tmp_path):
    class AtEpoch4(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 4:
                raise Interrupted

    def unbuilt():
        model = keras.Sequential([layers.Dense(10)])
        model.compile("sgd", "mse")
        return model

    x, y = np.arange(100.0).reshape(5, 20), np.zeros(5)
    options = {"epochs": 10, "batch_size": 1, "verbose": 0}
    with pytest.raises(Interrupted):
        unbuilt().fit(x, y, callbacks=[BackupAndRestore(tmp_path), AtEpoch4()], **options)
    history = unbuilt().fit(x, y, callbacks=[BackupAndRestore(tmp_path)], **options)
    assert len(history.history["loss"]) == 6


def test_r57_adams_slots_come_back_under_a_mirrored_strategy(tmp_path):
    def one():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
        return model

    x = np.ones((5, 1), "float32")
    options = {"batch_size": 5, "verbose": 0}
    with mirrored(2).scope():
        model = one()
        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(x, x, callbacks=[backup], **options)
    with mirrored(2).scope():
        other = one()
        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        other.fit(x, x, callbacks=[backup], **options)  # nothing is left to do
    kept = [v for v in other.optimizer.variables if "learning_rate" not in v.path]
    assert len(kept) == 5  # iteration, and m and v of kernel and bias
    assert_same(values(other), values(model))
    model.fit(x, x, **options)
    other.fit(x, x, **options)
    assert_same(values(other), values(model))


def test_an_unbuilt_model_goes_on_bit_for_bit(tmp_path):
    def unbuilt():
        keras.utils.set_random_seed(1)
        return make(built=False)

    whole, _ = fit(model=unbuilt)
    interrupted(tmp_path, 10, model=unbuilt)
    got, _ = fit(BackupAndRestore(tmp_path), model=unbuilt, restart=True)
    assert_same(got, whole)


def test_another_number_of_replicas_goes_on_with_the_same_training(tmp_path):
    @functools.cache
    def plain(strategy):  # no random numbers: each replica draws its own
        with STRATEGIES[strategy]():
            model = keras.Sequential(
                [keras.Input((64,)), layers.Dense(9, "tanh"), layers.Dense(10)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
        return model

    def model_of(strategy):
        return {"strategy": strategy, "model": lambda: plain(strategy)}

    keras.utils.set_random_seed(1)
    initial = plain("default").get_weights()
    plain("two replicas").set_weights(initial)
    whole, whole_history = fit(**model_of("default"))
    interrupted(tmp_path / "b", 10, **model_of("two replicas"))
    for strategy in ("three replicas", "one device"):
        shutil.copytree(tmp_path / "b", tmp_path / strategy)
        backup = BackupAndRestore(tmp_path / strategy)
        got, history = fit(backup, **model_of(strategy), restart=True)
        for mine, theirs in zip(got, whole, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)
        for name, logs in history.history.items():
            np.testing.assert_allclose(logs, whole_history.history[name][1:], rtol=1e-3)


def test_steps_per_execution(tmp_path):
    several, initial = warm(make(steps_per_execution=2))

    def again():
        reset(several, initial)
        return several

    whole, _ = fit(model=again)
    interrupted(tmp_path / "b", 3, model=again)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    got, _ = fit(BackupAndRestore(tmp_path / "b"), model=again, restart=True)
    assert_same(got, whole)
    with pytest.raises(BackupMismatchError, match=r"steps_per_execution to divide the 4 .* Got 3"):
        fit(BackupAndRestore(tmp_path / "c"), model=lambda: make(steps_per_execution=3))


def test_steps_per_epoch_that_let_a_pass_span_epochs(tmp_path):
    options = {"steps_per_epoch": 3, "epochs": 2}
    whole, _ = fit(**options)
    for after in (2, 4, 5):
        interrupted(tmp_path / str(after), after, **options)
        got, _ = fit(BackupAndRestore(tmp_path / str(after)), restart=True, **options)
        assert_same(got, whole)


def test_what_other_callbacks_remember(tmp_path):
    class Best(keras.callbacks.Callback):  # with a memory of its own
        best = 0.0

        def on_epoch_end(self, epoch, logs):
            self.best = max(self.best, logs["accuracy"])

        def get_state(self):
            return {"best": self.best}

        def set_state(self, state):
            self.best = state["best"]

    def callbacks():
        return [
            keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            Best(),
        ]

    options = {"epochs": 6}
    before, after = callbacks(), callbacks()
    whole, whole_history = fit(*before, Interrupt(-1), **options)
    interrupted(tmp_path, 3 * STEPS + 2, *callbacks(), **options)
    got, history = fit(BackupAndRestore(tmp_path), *after, Interrupt(-1), restart=True, **options)
    assert_same(got, whole)
    rates = whole_history.history["learning_rate"]
    assert history.history["learning_rate"] == rates[3:]
    assert rates[2] < 0.5 * rates[1]  # lowered in the part that was not trained again
    for mine, theirs in zip(after[:2], before[:2], strict=True):
        assert (mine.wait, mine.best) == (theirs.wait, theirs.best)
    assert after[3].best == before[3].best > 0
    assert_same(after[0].best_weights, before[0].best_weights)


def test_a_stop_that_training_asked_for_is_not_undone(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    fit(Stop(), BackupAndRestore(tmp_path, delete_checkpoint=False))
    _, history = fit(BackupAndRestore(tmp_path, delete_checkpoint=False))
    assert history.epoch == []


def test_the_csv_log_of_both_parts_is_that_of_the_whole(tmp_path):
    def log(name):
        return keras.callbacks.CSVLogger(tmp_path / name, append=True)

    fit(log("whole.csv"))
    first = log("parts.csv")
    interrupted(tmp_path / "b", 10, first)
    first.on_train_end()  # closes its file, as the end of the process would
    fit(log("parts.csv"), BackupAndRestore(tmp_path / "b"), restart=True)
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_validation_goes_on_too(tmp_path):
    options = {"validation_split": 0.2}
    _, whole = fit(**options)
    interrupted(tmp_path, 9, **options)
    _, history = fit(BackupAndRestore(tmp_path), restart=True, **options)
    assert history.history["val_loss"] == whole.history["val_loss"][1:]


def test_backups_are_kept_on_demand_and_training_is_then_extended(tmp_path):
    whole, _ = fit(epochs=4)
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    assert len(list(tmp_path.iterdir())) == 2
    got, history = fit(BackupAndRestore(tmp_path), restart=True, epochs=4)
    assert history.epoch == [2, 3]
    assert_same(got, whole)


def test_one_callback_serves_several_fits(tmp_path):
    backup = BackupAndRestore(tmp_path / "b")
    interrupted(tmp_path / "b", 16)
    for first_epoch in (2, 0):  # the model does not remember where the fit before it began
        got, history = fit(backup, restart=first_epoch == 2)
        assert history.epoch[0] == first_epoch
        assert_same(got, undisturbed()[0])


def test_keep(tmp_path):
    interrupted(tmp_path, 6, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "5"]


# What is wrong.


def flip(directory) -> None:
    for file in directory.rglob("*"):
        if file.is_file() and file.stat().st_size:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(bytes(content))


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # as in every test, but for warns
def test_a_damaged_backup_is_passed_over_with_a_warning_that_names_both(tmp_path):
    interrupted(tmp_path, 6)
    flip(tmp_path / "5")
    said = rf"not used: {tmp_path}/5: .*Going on with {tmp_path}/4, which is older"
    with pytest.warns(RuntimeWarning, match=said):
        got, _ = fit(BackupAndRestore(tmp_path, 1), restart=True)
    assert_same(got, undisturbed()[0])


def test_all_damaged_is_an_error_and_nothing_is_deleted(tmp_path):
    interrupted(tmp_path, 6)
    flip(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    said = r"Got 2, all damaged:\n.*/5: .*\n.*/4: .*\nNothing was deleted\. .* to start anew"
    with pytest.raises(BackupError, match=said):
        fit(BackupAndRestore(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_another_model_is_an_error_that_lists_every_difference(tmp_path):
    interrupted(tmp_path, 3)
    with pytest.raises(BackupMismatchError) as raised:
        fit(BackupAndRestore(tmp_path), model=lambda: make(width=8))
    text = str(raised.value)
    # Kernel, bias, gamma, beta, moving mean and variance, the next kernel; Adam's two for each of
    # those that are trained.
    assert f"variables of this program in {tmp_path}/2. Got 17 that differ" in text
    assert text.count(" float32; stored ") == 17
    assert re.search(r"expected \S+/kernel \(64, 8\) float32; stored \S+/kernel \(64, 16\)", text)
    assert "name another directory to start anew" in text


def test_another_optimizer_is_an_error(tmp_path):
    interrupted(tmp_path, 3)
    with pytest.raises(BackupMismatchError, match=r"expected nothing; stored adam\S+velocity"):
        fit(BackupAndRestore(tmp_path), model=lambda: make(optimizer=keras.optimizers.SGD(0.1)))


def test_another_batch_size_in_the_middle_of_an_epoch_is_an_error(tmp_path):
    interrupted(tmp_path, 3)
    said = r"epochs of 7 batches, .* after 2 of them. Got epochs of 13.*batch size"
    with pytest.raises(BackupMismatchError, match=said):
        fit(BackupAndRestore(tmp_path), batch_size=16)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backup_dir": ""}, "backup_dir: expected a directory"),
        ({"save_freq": False}, "Got False, which would never save. Pass save_before_preemption"),
        ({"save_freq": 0}, "number of steps that is at least 1, or False. Got 0"),
        ({"save_freq": True}, "Got True"),
        ({"save_freq": "batch"}, "Got 'batch'"),
        ({"keep": 0}, "keep: expected how many backups stay, at least 1. Got 0"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, said):
    with pytest.raises(ValueError, match=said):
        BackupAndRestore(**{"backup_dir": tmp_path, **arguments})


def test_a_directory_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupError, match="can be written to save in"):
        fit(BackupAndRestore(tmp_path / "file" / "x"), Interrupt(1))


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_backup_that_fails_later_is_a_warning_and_training_goes_on(tmp_path, monkeypatch):
    from_storage = "stratagem.recovery.storage._packed"

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(from_storage, full)
    with pytest.warns(RuntimeWarning, match=r"write .*1\. Got OSError: No space left"):
        _, history = fit(BackupAndRestore(tmp_path, 5, delete_checkpoint=True), epochs=2)
    assert len(history.epoch) == 2


def test_outside_fit_it_is_told_what_to_use(tmp_path):
    callbacks = keras.callbacks.CallbackList([BackupAndRestore(tmp_path)], model=make())
    with pytest.raises(RuntimeError, match=r"in a call of model.fit.*stratagem.train.Backup"):
        callbacks.on_train_begin()
