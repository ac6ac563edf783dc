"""How the end of a program is told from its outermost frame, and what SIGTERM does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from stratagem.strategies import leaving


def come_to_an_end(frames):
    frames.append(sys._getframe())
    for i in range(3):
        if i:
            break
    else:
        return 7


def catch(frames):
    frames.append(sys._getframe())
    try:
        sys.exit(3)
    except SystemExit:
        pass


def leave(frames):
    frames.append(sys._getframe())
    sys.exit(3)


def leave_in_the_middle(frames):
    frames.append(sys._getframe())
    with contextlib.nullcontext():
        try:
            raise SystemExit
        finally:
            frames.append(1)


def leave_below(frames):
    frames.append(sys._getframe())
    return leave([])


@pytest.mark.parametrize("end", [come_to_an_end, catch])
def test_a_program_that_came_to_its_end(end):
    end(frames := [])
    assert leaving.returned(frames[0])


@pytest.mark.parametrize("end", [leave, leave_in_the_middle, leave_below])
def test_a_program_that_was_left(end):
    with pytest.raises(SystemExit):
        end(frames := [])
    assert not leaving.returned(frames[0])


def test_what_python_has_printed_is_a_failure(monkeypatch):
    program = leaving.Program(keeps=False)
    assert program.how == leaving.EXITED  # this frame is still at work
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert program.how == leaving.FAILED


@pytest.fixture
def sigterm():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_leaves_time_to_keep_things(sigterm):
    program = leaving.Program(keeps=True)
    with pytest.raises(SystemExit) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert program.how == leaving.FAILED
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the second ends it at once
    program = leaving.Program(keeps=True)
    program.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_where_nothing_can_be_kept_sigterm_is_as_it_was(sigterm):
    leaving.Program(keeps=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    leaving.Program(keeps=True).close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_last_snapshot_that_fails_is_said(caplog):
    record = SimpleNamespace(began=False, freeze=lambda: None)
    link = SimpleNamespace(keep_last=lambda: OSError("no space"))
    with caplog.at_level(logging.WARNING, "stratagem"):
        assert leaving.keep(link, record)  # no step was begun: there is nothing to keep
        assert not caplog.text
        record.began = True
        assert not leaving.keep(link, record)
    assert "Expected a last snapshot before the program ends" in caplog.text
    assert "Got OSError: no space." in caplog.text
