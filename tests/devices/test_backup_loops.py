"""Backups and checkpoints of loops of one's own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import stratagem
from stratagem.errors import BackupError, BackupMismatchError, CorruptBackupError
from stratagem.recovery import storage as storage_module
from stratagem.train import Backup, Checkpoint, CheckpointManager, latest_checkpoint

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")


class Interrupted(Exception):
    """What ends a loop in these tests."""


class Loop:
    """A custom loop: a model with dropout, its optimizer, a metric, a counter on each replica."""

    def __init__(self, replicas: int, seed: int = 1):
        keras.utils.set_random_seed(seed)
        self.strategy = stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with self.strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dropout(0.5), layers.Dense(1)]
            )
            self.optimizer = keras.optimizers.Adam(0.05)
            self.metric = keras.metrics.Mean()
            self.rows = keras.Variable(
                0.1, trainable=False, synchronization="on_read", aggregation="sum", name="rows"
            )

    @property
    def objects(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "metrics": [self.metric, {"rows": self.rows}],
        }

    def _step(self, x):
        with stratagem.GradientTape() as tape:
            errors = (self.model(x, training=True) - 1.0)[:, 0]
            loss = stratagem.nn.compute_average_loss(errors**2)
        trainable = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trainable), trainable, strict=True))
        self.metric.update_state(loss)
        replica = stratagem.get_replica_context().replica_id_in_sync_group
        self.rows.assign_add(0.3 * (replica + 1))

    def batches(self):
        def source():
            for i in np.random.permutation(6):
                yield X[4 * i :][:4]

        return source()

    def train(self, directory=None, stop: int | None = None, epochs: int = 2):
        """Trains, with a backup after each step but those that end an epoch's pass."""
        directory = directory or "unused"
        with Backup(directory, **self.objects) as backup:
            start = backup.restore()
            step = start.step
            for epoch in range(start.epoch, epochs):
                for x in backup.batches(self.batches()):
                    self.strategy.run(self._step, args=(self.split(x),))
                    step += 1
                    backup.save(step, epoch, {"seen": step})
                    if step == stop:
                        raise Interrupted
                backup.save(step, epoch + 1)
        return start

    def split(self, x):
        count = self.strategy.num_replicas_in_sync
        parts = np.array_split(x, count)
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    def values(self):
        every = (*self.model.variables, *self.optimizer.variables, *self.metric.variables)
        return [v.numpy() for v in every]

    def components(self):
        return np.asarray(getattr(self.rows, "components", self.rows.value))


def same(got: Loop, want: Loop) -> None:
    for mine, theirs in zip(got.values(), want.values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(got.components(), want.components())


@pytest.mark.parametrize(("replicas", "stop"), [(1, 8), (2, 6), (2, 11)])
def test_a_loop_goes_on_bit_for_bit(tmp_path, replicas, stop):
    whole = Loop(replicas)
    assert whole.train(tmp_path / "whole").path is None
    with pytest.raises(Interrupted):
        Loop(replicas).train(tmp_path / "b", stop)
    loop = Loop(replicas, seed=9)
    start = loop.train(tmp_path / "b")
    assert (start.step, start.state["seen"]) == (stop, stop)
    assert start.path.parent == tmp_path / "b"
    same(loop, whole)


def test_components_are_shared_out_anew_on_another_number_of_replicas(tmp_path):
    with pytest.raises(Interrupted):
        Loop(3).train(tmp_path, stop=4)
    two = Loop(2, seed=9)
    two.train(tmp_path, epochs=0)
    total = 3 * 0.1 + 4 * 0.3 * (1 + 2 + 3)
    np.testing.assert_allclose(two.components(), [total / 2, total / 2], rtol=1e-5)
    one = Loop(1, seed=9)
    one.train(tmp_path, epochs=0)
    np.testing.assert_allclose(one.components(), total, rtol=1e-5)


def test_components_without_an_aggregation_need_as_many_replicas(tmp_path):
    def variable(replicas):
        devices = [f"CPU:{i}" for i in range(replicas)]
        strategy = stratagem.MirroredStrategy(devices)
        with strategy.scope():
            return keras.Variable(0.0, synchronization="on_read", aggregation="none", name="own")

    with Backup(tmp_path, own=variable(2)) as backup:
        backup.save(1)
    same_number = variable(2)
    Backup(tmp_path, own=same_number).restore()
    with pytest.raises(BackupMismatchError, match=r"Expected 2 replicas, on which own .* 'none'"):
        Backup(tmp_path, own=variable(3)).restore()


def test_every_difference_is_listed(tmp_path):
    with Backup(tmp_path, a=keras.Variable([1.0, 2.0], name="a"), b=[]) as backup:
        backup.save(1)
    with pytest.raises(BackupMismatchError) as raised:
        Backup(tmp_path, a=keras.Variable(1, name="a"), c=keras.Variable(1.0, name="c")).restore()
    text = str(raised.value)
    assert "Got 2 that differ" in text
    assert "a: expected a () int32; stored a (2,) float32" in text
    assert "c: expected c () float32; stored nothing" in text


def test_numbers_in_automatic_names_do_not_matter(tmp_path):
    with Backup(tmp_path, x=keras.layers.Embedding(3, 2)) as backup:
        backup._objects["x"].build()
        backup.save(1)
    other = keras.layers.Embedding(3, 2)
    other.build()
    assert other.name != backup._objects["x"].name
    Backup(tmp_path, x=other).restore()
    np.testing.assert_array_equal(other.embeddings, backup._objects["x"].embeddings)


def test_a_variable_of_two_objects_is_stored_once(tmp_path):
    shared = keras.Variable(1.0, name="shared")
    with Backup(tmp_path, a=shared, b=[shared]) as backup:
        backup.save(1)
    arrays, _ = storage_module.Storage(tmp_path).read(tmp_path / "1")
    assert list(arrays) == ["a/0"]


@pytest.mark.parametrize("state", [{"a": np.zeros(2)}, {"a": (1, 2)}, {1: 2}, {"a": object()}])
def test_a_state_that_json_cannot_hold(tmp_path, state):
    with Backup(tmp_path, v=keras.Variable(1.0)) as backup:
        with pytest.raises(TypeError, match=r"state: expected what JSON can hold.*keras.Variable"):
            backup.save(1, state=state)


def test_what_has_no_variables(tmp_path):
    said = r"Got\n  a: int\n  c: str\nPut plain Python values in the state dict"
    with pytest.raises(TypeError, match=said):
        Backup(tmp_path, a=1, b=keras.Variable(1.0), c=["x"])
    with pytest.raises(ValueError, match="Expected what to back up. Got nothing"):
        Backup(tmp_path)
    with pytest.raises(ValueError, match="keep: expected"):
        Backup(tmp_path, keep=0, a=keras.Variable(1.0))


def test_a_backup_in_the_middle_of_a_failure_is_finished(tmp_path):
    variable = keras.Variable(1.0)

    def loop():
        with Backup(tmp_path, v=variable) as backup:
            backup.save(1)
            raise Interrupted

    with pytest.raises(Interrupted):
        loop()
    assert (tmp_path / "1").is_dir()


def test_wait_tells_that_writing_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_packed", lambda _: 1 / 0)
    backup = Backup(tmp_path, v=keras.Variable(1.0))
    backup.save(1)
    with pytest.raises(BackupError, match="Got ZeroDivisionError"):
        backup.wait()


def test_remove(tmp_path):
    with Backup(tmp_path / "b", v=keras.Variable(1.0)) as backup:
        backup.save(1)
        backup.remove()
    assert not (tmp_path / "b").exists()


# Checkpoints as in tf.train.


def test_checkpoints_are_numbered_and_restored(tmp_path):
    value = keras.Variable(1.0, name="value")
    checkpoint = Checkpoint(value=value)
    assert checkpoint.value is value
    first = checkpoint.save(tmp_path / "ckpt")
    value.assign(2.0)
    second = checkpoint.save(tmp_path / "ckpt")
    assert [first, second] == [str(tmp_path / "ckpt-1"), str(tmp_path / "ckpt-2")]
    assert latest_checkpoint(tmp_path) == second
    checkpoint.restore(first).assert_consumed()
    assert (float(value), int(checkpoint.save_counter)) == (1.0, 1)
    checkpoint.read(second).expect_partial()
    assert float(value) == 2.0


def test_write_takes_exactly_the_path(tmp_path):
    value = keras.Variable(1.0)
    checkpoint = Checkpoint(value=value)
    for number in (1.0, 2.0):
        value.assign(number)
        assert checkpoint.write(tmp_path / "best") == str(tmp_path / "best")
    value.assign(0.0)
    checkpoint.restore(tmp_path / "best")
    assert float(value) == 2.0
    assert int(checkpoint.save_counter) == 0


def test_restoring_none_changes_nothing(tmp_path):
    value = keras.Variable(1.0)
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None
    Checkpoint(value=value).restore(latest_checkpoint(tmp_path)).assert_existing_objects_matched()
    assert float(value) == 1.0


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(CorruptBackupError, match=f"{tmp_path}/ckpt-7: "):
        Checkpoint(value=keras.Variable(1.0)).restore(tmp_path / "ckpt-7")


def test_optimizers_are_built_where_their_model_is_known(tmp_path):
    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((3,)), layers.Dense(1)])

    made = model()
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(made.trainable_variables)
    optimizer.apply([np.ones((3, 1)), np.ones(1)])
    path = Checkpoint(model=made, optimizer=optimizer).save(tmp_path / "ckpt")
    other = keras.optimizers.Adam(0.2)
    Checkpoint(model=model(), optimizer=other).restore(path)
    for mine, theirs in zip(other.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_a_manager_keeps_the_newest(tmp_path):
    value = keras.Variable(0.0)
    manager = CheckpointManager(Checkpoint(value=value), tmp_path, max_to_keep=2)
    assert manager.latest_checkpoint is None
    for number in range(1, 4):
        value.assign(number)
        assert manager.save() == str(tmp_path / f"ckpt-{number}")
    assert manager.checkpoints == [str(tmp_path / f"ckpt-{n}") for n in (2, 3)]
    assert manager.directory == str(tmp_path)
    value.assign(0.0)
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert float(value) == 3.0
    assert manager.save(checkpoint_number=10).endswith("ckpt-10")


def test_a_manager_initialises_when_there_is_nothing(tmp_path):
    value = keras.Variable(0.0)
    manager = CheckpointManager(
        Checkpoint(value=value), tmp_path, 1, "name", init_fn=lambda: value.assign(5.0)
    )
    assert manager.restore_or_initialize() is None
    assert float(value) == 5.0
    assert manager.save() == str(tmp_path / "name-1")


def test_a_manager_saves_at_intervals(tmp_path):
    step = keras.Variable(0, dtype="int32")
    manager = CheckpointManager(
        Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    saved = []
    for n in range(8):
        step.assign(n)
        if manager.save() is not None:
            saved.append(n)
    assert saved == [0, 3, 6]
    assert manager.save(check_interval=False) is not None
    with pytest.raises(ValueError, match="a step_counter with checkpoint_interval=3. Got none"):
        CheckpointManager(Checkpoint(step=step), tmp_path, None, checkpoint_interval=3)
    with pytest.raises(ValueError, match="at least 1. Got 0"):
        CheckpointManager(Checkpoint(step=step), tmp_path, 0)
