"""The control channel, its processes played by threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from stratagem.cluster import channel as channel_module
from stratagem.cluster.channel import Channel, LocalStore
from stratagem.errors import PeerTimeoutError

NAMES = ["worker 0 at a:1", "worker 1 at b:2", "worker 2 at c:3"]


def everywhere(call, ranks=range(3), seconds=10.0):
    """`call(channel)` on each rank at once; results or errors by rank, and the store."""
    store = LocalStore()

    def one(rank):
        try:
            return call(Channel(store, rank, NAMES, seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, ranks)), store


def test_all_gather_gives_everyone_all_parts_by_rank():
    results, store = everywhere(
        lambda c: [c.stream("s").all_gather(b"%d.%d" % (c.rank, i), "x") for i in range(50)]
    )
    assert results == [[[b"%d.%d" % (r, i) for r in range(3)] for i in range(50)]] * 3
    assert len(store) <= 4  # only the last exchange is kept


def test_payloads_may_be_empty_and_binary():
    parts = [b"", bytes(range(256)), b"\x00" * 1000]
    results, _ = everywhere(lambda c: c.stream("s").all_gather(parts[c.rank], "x"))
    assert results == [parts] * 3


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_the_bytes_of_the_first_come_to_all_however_many(size):
    data = [bytes([rank + 1]) * size for rank in range(3)]
    results, store = everywhere(lambda c: c.stream("s").from_first(data[c.rank], "x"))
    assert results == [data[0]] * 3
    assert len(store) <= 4


def test_streams_do_not_order_each_other():
    def call(channel):
        names = ("a", "b") if channel.rank else ("b", "a")
        with ThreadPoolExecutor(2) as pool:
            return dict(
                pool.map(lambda n: (n, channel.stream(n).all_gather(n.encode(), "x")), names)
            )

    results, _ = everywhere(call)
    assert results == [{"a": [b"a"] * 3, "b": [b"b"] * 3}] * 3


def test_one_process_needs_no_store():
    assert Channel(None, 0, NAMES[:1], 1.0).stream("s").all_gather(b"x", "it") == [b"x"]


@pytest.mark.parametrize("present", [(0, 1), (0,), (1, 2), (2,)])
def test_who_is_missing_is_named(present):
    results, _ = everywhere(
        lambda c: c.stream("s").all_gather(b"", "the weather"), ranks=present, seconds=0.2
    )
    absent = [r for r in range(3) if r not in present]
    for rank, error in zip(present, results, strict=True):
        assert isinstance(error, PeerTimeoutError)
        text = str(error)
        assert "Expected all 3 processes to agree on the weather within 0.2 s." in text
        assert f"(this is {NAMES[rank]})" in text
        missing = text.partition("Missing: ")[2].partition(" (this is")[0]
        assert missing == ", ".join(NAMES[r] for r in absent)


def test_who_is_waited_for_is_said_before_the_deadline(monkeypatch, caplog):
    monkeypatch.setattr(channel_module, "_FIRST_WARNING_SECONDS", 0.1)
    monkeypatch.setattr(channel_module, "_WARNING_SECONDS", 0.1)
    results, _ = everywhere(
        lambda c: c.stream("s").all_gather(b"", "the weather"), ranks=(1, 2), seconds=1.0
    )
    assert all(isinstance(error, PeerTimeoutError) for error in results)
    texts = [record.getMessage() for record in caplog.records]
    for rank in (1, 2):
        mine = [text for text in texts if f"(this is {NAMES[rank]})" in text]
        assert len(mine) >= 2
        assert "Waiting for all processes to agree on the weather for 0 s, up to 1 s." in mine[0]
        assert NAMES[0] in mine[-1]
