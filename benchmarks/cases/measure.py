"""How every contender measures itself: the first step, then one sample whenever it is its turn.

A contender is a script that takes `--steps` and `--samples` and talks in lines with run.py, which
lets several of them take turns, each in a process of its own: it prints its first step, waits for
a line, takes a sample, prints it, waits again; after the last sample it says what it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pair


def options(*extra: tuple[str, list[str]]) -> argparse.Namespace:
    """The arguments of a contender.

    Args:
        extra: positional arguments, each with its choices.
    """
    parser = argparse.ArgumentParser()
    for name, choices in extra:
        parser.add_argument(name, choices=choices)
    parser.add_argument("--steps", type=int, required=True, help="steps in one sample")
    parser.add_argument("--samples", type=int, required=True)
    return parser.parse_args()


def say(**facts: Any) -> None:
    """One line of JSON for run.py.

    Args:
        facts: `first` (seconds of the first step: trace, compile, run), then `sample` for each
            sample (seconds of a step, or rows per second), in the end `loss` and `about`.
    """
    print(json.dumps(facts), flush=True)


def wait_for_turn() -> None:
    """Returns when run.py lets this contender take its next sample."""
    if not sys.stdin.readline():
        raise EOFError("Expected a line on standard input for each sample. Got its end.")
    pair.pass_turn()


def loop(
    step: Callable[[Any], Any], batches: list[Any], steps: int, samples: int,
    wait: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Times a custom loop, in seconds of one step.

    A loop does not look at each loss, it waits at the end of a sample.

    Args:
        step: takes one prepared batch, returns the loss.
        batches: taken in turns.
        steps: steps in one sample.
        samples: samples wanted.
        wait: returns when the given loss, and so the step that made it, is there.
    """

    def sample() -> float:
        start = time.perf_counter()
        for i in range(steps):
            loss = step(batches[i % len(batches)])
        wait(loss)
        return (time.perf_counter() - start) / steps

    start = time.perf_counter()
    wait(step(batches[0]))
    first = time.perf_counter() - start
    sample()  # warm
    say(first=first)
    for _ in range(samples):
        wait_for_turn()
        say(sample=sample())


def closures(
    schedule: Callable[[], Any], join: Callable[[], Any], steps: int, samples: int
) -> None:
    """Times closures of a coordinator, in closures per second.

    Args:
        schedule: schedules one.
        join: waits for all that were scheduled.
        steps: closures in one sample.
        samples: samples wanted.
    """

    def sample(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            schedule()
        join()
        return count / (time.perf_counter() - start)

    first = 1 / sample(1)
    sample(steps)  # warm
    say(first=first)
    for _ in range(samples):
        wait_for_turn()
        say(sample=sample(steps))
