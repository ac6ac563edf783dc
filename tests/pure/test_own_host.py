"""Where a task listens: at its own host of the cluster."""

from __future__ import annotations

import re
import socket

import pytest

from stratagem.cluster import own_host

FAR = "192.0.2.1"  # of a network for documents


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_a_host_of_this_machine_is_taken_as_it_is(host):
    addresses = {"worker 0": f"{host}:2222", "worker 1": "localhost:2223"}
    assert own_host.find("worker 0", addresses) == host
    assert own_host.is_loopback(host)


@pytest.mark.skipif(not socket.has_ipv6, reason="a machine without IPv6")
def test_the_brackets_of_ipv6_go():
    assert own_host._host("[::1]:2222") == "::1"
    assert own_host.is_loopback("[::1]")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(
        ValueError, match=re.escape("TF_CONFIG cluster.worker[1]: expected an")
    ) as e:
        own_host.find("worker 1", {"worker 0": "localhost:1", "worker 1": f"{FAR}:2222"})
    assert f"Got {FAR}:2222: Cannot assign requested address" in str(e.value)
    assert "The task's type and index may be another task's" in str(e.value)
    assert not own_host.is_loopback(FAR)


def test_a_host_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="Got no-such-host.invalid:2: the host name is unknown"):
        own_host.find("worker 0", {"worker 0": "no-such-host.invalid:2", "worker 1": f"{FAR}:1"})
    assert not own_host.is_loopback("no-such-host.invalid")


def test_a_name_that_is_loopback_here_is_refused_where_others_are_elsewhere(monkeypatch):
    known = {"this-machine": "127.0.1.1", "that-machine": FAR}

    def look_up(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    addresses = {"chief 0": "this-machine:2222", "worker 0": "that-machine:2222"}
    with pytest.raises(ValueError, match=re.escape("TF_CONFIG cluster.chief[0]: expected an")) as e:
        own_host.find("chief 0", addresses)
    text = "here that is 127.0.1.1, which tasks on other machines (such as that-machine) do not"
    assert text in str(e.value)
    assert "Write the machine's IP address in TF_CONFIG" in str(e.value)
