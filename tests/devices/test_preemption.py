"""A program that is told to end saves the same step on all its processes, and leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest

import stratagem
from stratagem.callbacks import BackupAndRestore
from stratagem.cluster.channel import Channel, LocalStore
from stratagem.errors import PeerTimeoutError
from stratagem.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from stratagem.recovery import preemption
from stratagem.recovery.agreement import InJob
from stratagem.recovery.termination import TerminationWatch
from stratagem.train import Checkpoint, CheckpointManager

SECONDS = 30.0


def wait_for(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("Expected the condition to hold in time. It does not.")
        time.sleep(0.005)


def terminate(handler) -> None:
    """This process gets SIGTERM, and the handler knows."""
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: handler._agreement.announced("leave"))


class Training:
    """A counter that a step of training adds one to."""

    def __init__(self, directory, config=None, agreement=None, manager=True):
        self.value = keras.Variable(0.0, name="value")
        self.checkpoint = Checkpoint(value=self.value)
        saver = CheckpointManager(self.checkpoint, directory, 3) if manager else self.checkpoint
        self.handler = PreemptionCheckpointHandler(
            None, saver, directory, config, agreement=agreement
        )

    def step(self):
        self.value.assign_add(1.0)
        return float(self.value)

    def run(self):
        return self.handler.run(self.step)


def stored(directory) -> tuple[float, int]:
    """Value and number of runs in the newest checkpoint."""
    training = Training(directory)
    training.handler.close()
    return float(training.value), training.handler.total_run_calls


def test_row_62_sigterm_after_three_runs(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    training = Training(tmp_path)
    for _ in range(3):
        training.run()
    terminate(training.handler)
    assert training.run() == 4.0
    with pytest.raises(SystemExit) as raised:
        training.run()
    assert raised.value.code == 42
    assert float(training.value) == 4.0
    assert stored(tmp_path) == (4.0, 4)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_next_program_goes_on(tmp_path):
    training = Training(tmp_path, manager=False)
    training.run()
    terminate(training.handler)
    training.run()
    with pytest.raises(SystemExit):
        training.run()
    again = Training(tmp_path, manager=False)
    with again.handler as handler:
        assert (float(again.value), handler.total_run_calls) == (2.0, 2)
        assert handler.run(again.step) == 3.0
        assert handler.total_run_calls == 3
    assert int(again.checkpoint.checkpointed_runs) == 2


def test_an_exit_fn_that_does_not_exit(tmp_path):
    left = []
    training = Training(tmp_path, TerminationConfig(exit_fn=lambda: left.append(True)))
    training.run()
    terminate(training.handler)
    assert [training.run() for _ in range(3)] == [2.0, 3.0, 4.0]
    assert left == [True]
    assert stored(tmp_path) == (2.0, 2)


def test_a_function_is_polled_instead_of_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr("stratagem.recovery.termination._POLL_SECONDS", 0.01)
    before = signal.getsignal(signal.SIGTERM)
    told = threading.Event()
    training = Training(tmp_path, TerminationConfig(termination_watcher_fn=told.is_set))
    assert signal.getsignal(signal.SIGTERM) is before
    training.run()
    told.set()
    wait_for(lambda: training.handler._agreement.announced("leave"))
    training.run()
    with pytest.raises(SystemExit):
        training.run()
    assert stored(tmp_path) == (2.0, 2)


def test_a_grace_period_saves_twice(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])

    def step():
        now[0] += 1.0
        return training.step()

    config = TerminationConfig(grace_period=20.0)
    training = Training(tmp_path, config)
    done = [training.handler.run(step) for _ in range(2)]
    training.handler._agreement.announce("leave")

    def to_the_end():
        while True:
            done.append(training.handler.run(step))

    with pytest.raises(SystemExit):
        to_the_end()
    paths = training.handler._manager.checkpoints
    # Told before step 3, saved after it. From 20 - 6 steps later on one more step is made.
    assert len(done) == 17
    assert stored(tmp_path) == (17.0, 17)
    training.checkpoint.restore(paths[0])
    assert float(training.value) == 3.0


def test_a_save_fn_saves_instead(tmp_path):
    saved = []
    config = TerminationConfig(save_fn=lambda *a, **k: saved.append((a, k)))
    training = Training(tmp_path, config)

    def loop():
        with training.handler.watch_preemption_scope():
            for number in range(9):
                training.step()
                training.handler.save_checkpoint_if_preempted(number, check_interval=False)
                if number == 3:
                    terminate(training.handler)

    with pytest.raises(SystemExit):
        loop()
    assert saved == [((5,), {"check_interval": False})]
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong(tmp_path):
    checkpoint = Checkpoint(value=keras.Variable(1.0))
    with pytest.raises(ValueError, match="Expected checkpoint_dir with a Checkpoint"):
        PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(TypeError, match=r"Checkpoint or CheckpointManager .* Got int"):
        PreemptionCheckpointHandler(None, 3, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grace_period: .* Got -1"):
        TerminationConfig(grace_period=-1)
    failed = []

    def in_a_thread():
        with pytest.raises(RuntimeError, match=r"from the main thread.* termination_watcher_fn"):
            PreemptionCheckpointHandler(None, checkpoint, tmp_path)
        failed.append(True)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert failed == [True]


def test_the_watcher_of_tf_says_nothing():
    watcher = PreemptionWatcher()
    assert watcher.preemption_message is None
    watcher.block_until_worker_exit()


# Being told.


def test_the_main_thread_need_not_run_python_to_be_told():
    told = threading.Event()
    watch = TerminationWatch(told.set)
    watch.start()
    try:
        # Told while this thread is in native code that does not return: from the watch's thread.
        inside = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM))
        seen = []
        watch._told = lambda: seen.append(threading.current_thread() is threading.main_thread())
        inside.start()
        inside.join()
        wait_for(lambda: seen)
        assert seen == [False]
    finally:
        watch.stop()


def test_it_is_told_once_and_watches_can_be_nested():
    counts = [0, 0]

    def count(i):
        counts[i] += 1

    before = signal.getsignal(signal.SIGTERM)
    outer, inner = (TerminationWatch(lambda i=i: count(i)) for i in range(2))
    outer.start()
    inner.start()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: counts == [1, 1])
    inner.stop()
    outer.stop()
    outer.stop()
    assert counts == [1, 1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_signals_still_reach_asyncio():
    async def main():
        reached = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reached.set)
        watch = TerminationWatch(lambda: None)
        watch.start()
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(reached.wait(), SECONDS)
        finally:
            watch.stop()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    asyncio.run(main())


# Agreeing.


def channels(count: int, seconds: float = SECONDS) -> list[Channel]:
    store = LocalStore()
    return [Channel(store, i, [f"worker {i}" for i in range(count)], seconds) for i in range(count)]


def in_threads(functions) -> list:
    results: list = [None] * len(functions)

    def call(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return results


@pytest.fixture
def agreements():
    made = []

    def make(count: int, seconds: float = SECONDS):
        made.extend(InJob(c, "test", preemption.TOPICS) for c in channels(count, seconds))
        return made

    yield make
    in_threads([agreement.close for agreement in made])


def test_all_hear_of_it_and_the_furthest_one_decides(agreements):
    three = agreements(3)
    counters = [5, 3, 9]
    assert not any(a.announced("leave", n) for a, n in zip(three, counters, strict=True))
    three[1].announce("leave")
    three[1].announce("leave")
    wait_for(lambda: all(a.announced("leave") for a in three))
    # Some ask before they have come to the next place, as those do that wait for nobody.
    assert [a.latest("leave", 0) for a in three] == [10, 10, 10]
    assert all(a.announced("leave", 11) for a in three)
    assert [a.latest("leave", 0) for a in three] == [10, 10, 10]
    assert not any(a.announced("final") for a in three)


def test_a_process_that_does_not_come_is_named(agreements):
    two = agreements(2, seconds=0.2)
    two[1].close()
    two[0].announce("leave")
    with pytest.raises(PeerTimeoutError, match=r"the last step \(leave\).*Missing: worker 1"):
        two[0].latest("leave", 3)


def test_processes_at_different_steps_save_the_same_one(tmp_path, agreements):
    two = agreements(2)
    config = TerminationConfig(termination_watcher_fn=lambda: False)
    trainings = [Training(tmp_path / str(i), config, agreement=a) for i, a in enumerate(two)]
    for training, steps in zip(trainings, (3, 5), strict=True):
        for _ in range(steps):
            training.run()
    two[0].announce("leave")
    wait_for(lambda: two[1].announced("leave"))

    def to_the_end(training):
        try:
            for _ in range(20):
                training.run()
        except SystemExit as e:
            return e.code

    assert in_threads([lambda t=t: to_the_end(t) for t in trainings]) == [42, 42]
    assert [stored(tmp_path / str(i)) for i in range(2)] == [(6.0, 6), (6.0, 6)]


# In fit.

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")


class At(keras.callbacks.Callback):
    """Sends SIGTERM to this process in a step."""

    def __init__(self, epoch: int, batch: int, during: str = "on_train_batch_begin"):
        super().__init__()
        self._epoch, self._batch = epoch, batch
        setattr(self, during, self._event)

    def on_epoch_begin(self, epoch, logs=None):
        self._now = epoch

    def _event(self, batch, logs=None):
        if (self._now, batch) == (self._epoch, self._batch):
            before = self.backup._agreement.announced
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: before("leave"))


def fit(backup, *callbacks, model=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    for callback in callbacks:
        callback.backup = backup
    callbacks = [c for c in (backup, *callbacks) if c is not None]
    model.fit(X, X[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    ("save_freq", "epoch", "batch", "saved"),
    [
        (False, 1, 2, (1, 3)),
        (False, 0, 4, (1, 0)),  # an epoch's last step: after the end of the epoch
        (2, 2, 0, (2, 1)),
        ("epoch", 1, 1, (1, 2)),
    ],
)
def test_fit_saves_after_the_step_and_leaves_with_42(tmp_path, save_freq, epoch, batch, saved):
    before = signal.getsignal(signal.SIGTERM)
    whole = fit(None)
    backup = BackupAndRestore(tmp_path, save_freq, save_before_preemption=True)
    with pytest.raises(SystemExit) as raised:
        fit(backup, At(epoch, batch))
    assert raised.value.code == 42
    assert signal.getsignal(signal.SIGTERM) is before
    assert (backup._epoch, backup._batch) == saved
    got = fit(BackupAndRestore(tmp_path, save_freq, save_before_preemption=True))
    for mine, theirs in zip(got, whole, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert signal.getsignal(signal.SIGTERM) is before


def test_fit_without_it_does_not_touch_sigterm(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(signal.getsignal(signal.SIGTERM))

    fit(BackupAndRestore(tmp_path), Look())
    assert set(seen) == {before}


def test_it_is_public():
    assert stratagem.experimental.PreemptionCheckpointHandler is PreemptionCheckpointHandler
    assert stratagem.callbacks.BackupAndRestore is BackupAndRestore
