"""What workers tell each other about the steps ahead; the workers are threads here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stratagem.cluster.channel import Channel, LocalStore
from stratagem.data.exchange import Exchange, StoppedError
from stratagem.data.prefetch import Prefetch
from stratagem.errors import PeerTimeoutError

NAMES = ("worker 0 at a:1", "worker 1 at b:1", "worker 2 at c:1")


def exchanges(count: int, seconds: float = 30) -> tuple[list[Exchange], LocalStore]:
    store = LocalStore()
    channels = [Channel(store, rank, NAMES[:count], seconds) for rank in range(count)]
    return [Exchange(channel, "pass 0") for channel in channels], store


def together(*calls):
    """What each call returns or raises, all at once."""

    def one(call):
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def test_everyone_gets_the_messages_of_all_by_worker():
    own, store = exchanges(3)
    calls = [lambda e=e, w=w: [e.all_gather([w, turn]) for turn in range(5)] for w, e in
             enumerate(own)]  # fmt: skip
    assert together(*calls) == [[[[w, turn] for w in range(3)] for turn in range(5)]] * 3
    assert len(store) == 3  # the last turn's alone


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_failure_reaches_the_others_in_its_turn(broken):
    own, _ = exchanges(3)

    def call(worker):
        own[worker].all_gather("first")
        if worker == broken:
            own[worker].fail(OSError("no disk"))
            return "failed"
        return own[worker].all_gather("second")

    results = together(*(lambda w=w: call(w) for w in range(3)))
    assert results[broken] == "failed"
    for worker in {0, 1, 2} - {broken}:
        assert isinstance(results[worker], RuntimeError)
        assert f"Got {NAMES[broken]}: OSError: no disk" in str(results[worker])
        assert f"this is {NAMES[worker]}" in str(results[worker])


def test_failing_after_the_exchange_failed_says_nothing_more():
    (first, second), store = exchanges(2)
    second.fail(OSError("no disk"))
    with pytest.raises(RuntimeError, match="no disk"):
        first.all_gather(1)
    before = len(store)
    first.fail(RuntimeError("what the thread of first ended with"))
    assert len(store) == before


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_worker_that_does_not_come_is_named_once_somebody_waits(waiting):
    own, _ = exchanges(2, seconds=0.5)
    own[waiting].awaited_since = time.monotonic() - 1
    with pytest.raises(PeerTimeoutError, match=f"Missing: {NAMES[1 - waiting]}.*within 0.5 s|"
                       f"within 0.5 s. Missing: {NAMES[1 - waiting]}"):  # fmt: skip
        own[waiting].all_gather(1)


def test_nobody_waits_for_a_stopped_exchange():
    (first, _), _ = exchanges(2, seconds=0.01)
    threading.Timer(0.05, first.stop.set).start()
    with pytest.raises(StoppedError):  # and no time-out before, as nobody waited for it
        first.all_gather(1)


# --- Prefetch ---


def test_items_come_in_order_and_errors_after_them():
    def items():
        yield 1
        yield 2
        raise OSError("no disk")

    (own, _), store = exchanges(2)
    ahead = Prefetch(items(), own)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="no disk"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert len(store) == 1  # the other worker is told


def test_it_reads_ahead_but_not_far():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    (own,), _ = exchanges(1)
    ahead = Prefetch(endless(), own)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert len(drawn) <= 3 + 2 + 1
    ahead.close()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_thread_ends_with_who_reads(how):
    before = threading.active_count()

    def waits_for_ever():
        yield 1
        exchange.all_gather(1)

    (exchange, _), _ = exchanges(2)
    ahead = Prefetch(waits_for_ever(), exchange)
    assert next(ahead) == 1
    assert threading.active_count() == before + 1
    if how == "close":
        ahead.close()
    else:
        del ahead
    assert threading.active_count() == before
