"""How every contender measures itself: the first step, then samples of many steps.

A contender is a script that takes `--steps` and `--samples`, and prints one line of JSON. Each
runs in a process of its own, so that none warms a cache or sizes a thread pool for another.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any


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


def loop(
    step: Callable[[Any], Any], batches: list[Any], steps: int, samples: int,
    wait: Callable[[Any], Any],
) -> tuple[float, list[float]]:  # fmt: skip
    """Times a custom loop.

    Args:
        step: takes one prepared batch, returns the loss.
        batches: taken in turns.
        steps: steps in one sample.
        samples: samples wanted.
        wait: returns when the given loss, and so the step that made it, is there.

    Returns:
        Seconds of the first step, and for each sample seconds of one step. A loop does not look at
        each loss, it waits at the end of a sample.
    """
    start = time.perf_counter()
    wait(step(batches[0]))
    first = time.perf_counter() - start

    def sample() -> float:
        begin = time.perf_counter()
        for i in range(steps):
            loss = step(batches[i % len(batches)])
        wait(loss)
        return (time.perf_counter() - begin) / steps

    sample()  # warm
    return first, [sample() for _ in range(samples)]


def report(first: float, samples: list[float], loss: float, **about: Any) -> None:
    """Prints what a contender found.

    Args:
        first: seconds of the first step: trace, compile, run.
        samples: seconds of one step, or rows per second.
        loss: the last loss, to see that all contenders trained the same model.
        about: versions, devices.
    """
    print(json.dumps({"first": first, "samples": samples, "loss": loss, "about": about}))
