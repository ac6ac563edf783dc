"""Lines of several tasks on one terminal: whole, in order, without what would wreck it."""

from __future__ import annotations

import io

import pytest

from stratagem.launcher.abstract import Task
from stratagem.launcher.lines import LineBuffer, clean
from stratagem.launcher.output import Output, last_words, renderer
from stratagem.recovery.policy import Ended, ServiceLost

W0, W1 = Task("worker", 0), Task("worker", 1)


def _fed(*pieces: bytes, every: float = 0.0) -> tuple[list[bytes], list[bytes]]:
    """Lines while the pieces come, and those at the end."""
    buffer = LineBuffer()
    lines = [line for i, piece in enumerate(pieces) for line in buffer.feed(piece, i * every)]
    return lines, buffer.close()


class TestLines:
    def test_pieces_cut_anywhere_become_whole_lines(self):
        text = "eins\nzwei ü\n\nvier\n".encode()
        for cut in range(len(text)):
            assert _fed(text[:cut], text[cut:]) == (text.split(b"\n")[:-1], [])

    def test_a_last_line_without_newline_comes_at_the_end(self):
        assert _fed(b"a\nb") == ([b"a"], [b"b"])

    def test_windows_newlines(self):
        assert _fed(b"a\r", b"\nb\r\n") == ([b"a", b"b"], [])

    def test_a_progress_bar_ends_as_one_line(self):
        drawings = [b"\r 10%", b"\r 50%", b"\r100%\n"]
        assert _fed(*drawings) == ([b" 10%", b"100%"], [])
        assert _fed(b"".join(drawings)) == ([b"100%"], [])

    def test_a_progress_bar_shows_at_most_once_a_second(self):
        drawings = [b"%d%%\r" % i for i in range(100)]
        lines, end = _fed(*drawings, every=0.1)
        assert 9 <= len(lines) <= 11
        assert end == [b"99%"]

    def test_a_line_without_end_is_broken(self):
        lines, end = _fed(b"x" * (2**20 + 1))
        assert [len(line) for line in lines + end] == [2**20, 1]

    @pytest.mark.parametrize(
        ("line", "cleaned"),
        [
            (b"plain", b"plain"),
            (b"\x08\x08\x081/3", b"1/3"),
            (b"\x1b[2K\x1b[1Aup", b"up"),
            (b"\x1b[?25lhidden", b"hidden"),
            (b"\x1b[31mred\x1b[0m", b"\x1b[31mred\x1b[0m"),
            (b"\x1b[31mred", b"\x1b[31mred\x1b[0m"),
        ],
    )
    def test_nothing_moves_the_cursor(self, line, cleaned):
        assert clean(line) == cleaned


class TestOutput:
    def _output(self) -> tuple[Output, io.BytesIO, io.BytesIO]:
        out, err = io.BytesIO(), io.BytesIO()
        plain = renderer(io.StringIO())
        return Output([W0, W1], out, err, (plain, plain)), out, err

    def test_each_line_has_its_task_in_front(self):
        output, out, err = self._output()
        output.line(W0, b"a", is_error=False)
        output.line(W1, b"\xff not UTF-8", is_error=True)
        output.line("coordination service", b"c", is_error=True)  # Kept, for when it fails.
        output.say("one\ntwo")
        assert out.getvalue() == b"[worker 0] a\n"
        assert err.getvalue().splitlines() == [
            b"[worker 1] \xff not UTF-8",
            b"[stratagem] one",
            b"[stratagem] two",
        ]

    def test_colours_only_on_a_terminal(self, monkeypatch):
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert renderer(Terminal())("[worker 0]", "cyan") == b"\x1b[36m[worker 0]\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert renderer(Terminal())("[worker 0]", "cyan") == b"[worker 0]"
        assert renderer(io.StringIO())("[worker 0]", "cyan") == b"[worker 0]"

    def test_the_first_failure_comes_last(self):
        output, _, err = self._output()
        for line in b"noise\nTraceback (most recent call last):\n  File x\nValueError: boom".split(
            b"\n"
        ):
            output.line(W1, line, is_error=True)
        output.line(W0, b"Traceback (most recent call last): of another", is_error=True)
        first = Ended("worker", 1, 1, 3.21)
        output.failure(first, [Ended("worker", 0, 43, 3.4)])
        assert err.getvalue().splitlines()[-5:] == [
            b"[stratagem] also ended: worker 0, exit code 43: a peer was lost",
            b"[stratagem] first failure: worker 1, exit code 1, 3.2 s after start",
            b"| Traceback (most recent call last):",
            b"|   File x",
            b"| ValueError: boom",
        ]

    def test_a_silent_failure_is_called_so(self):
        output, _, err = self._output()
        output.failure(Ended("worker", 1, -9, 1.0), [])
        assert err.getvalue().endswith(b"It wrote nothing to standard error.\n")

    def test_what_the_service_wrote_is_shown_if_it_fails(self):
        output, _, err = self._output()
        output.line("coordination service", b"port taken", is_error=True)
        output.failure(ServiceLost(1, 0.5), [])
        assert err.getvalue().splitlines() == [
            b"[stratagem] first failure: coordination service, exit code 1, 0.5 s after start",
            b"| port taken",
        ]

    def test_last_words(self):
        chained = [
            b"noise",
            b"Traceback (most recent call last):",
            b"KeyError: 1",
            b"",
            b"During handling of the above exception, another exception occurred:",
            b"",
            b"Traceback (most recent call last):",
            b"ValueError: 2",
        ]
        assert last_words(chained) == chained[1:]
        earlier = [b"Traceback (most recent call last):", b"KeyError: caught", *chained]
        assert last_words(earlier) == chained[1:]
        assert last_words([b"%d" % i for i in range(100)]) == [b"%d" % i for i in range(70, 100)]
        assert last_words([]) == []
