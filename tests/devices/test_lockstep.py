"""Units of work that are done again when processes change: processes are threads here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stratagem.cluster.channel import Channel, LocalStore
from stratagem.cluster.lockstep import Lockstep
from stratagem.cluster.member import Generation
from stratagem.errors import GroupChangedError

SECONDS = 20.0
UNITS = 5


class Job:
    """One process's view of a job whose generations are known beforehand."""

    may_change = True

    def __init__(self, name: str, generations: list[tuple[str, ...]], stores: list[LocalStore]):
        self.name, self._generations, self._stores = name, generations, stores
        self.number = -1
        self.generation: Generation | None = None

    @property
    def is_waiting(self) -> bool:
        return self.generation is None

    def meet(self) -> None:
        self.number += 1
        while self.name not in self._generations[self.number]:
            self.number += 1
        members = self._generations[self.number]
        self.generation = Generation(self.number, members, "nowhere", "a test")
        rank = members.index(self.name)
        self.channel = Channel(self._stores[self.number], rank, members, SECONDS)


class Process(threading.Thread):
    """Adds a number that depends on the generation in each unit.

    Args:
        job: of it.
        lost: units, by generation, in which it hears of the next one before it is done.
        broken: generations in which it hears of the next one while it does a unit again.
        last: the unit in which it dies.
    """

    def __init__(
        self, job: Job, lost: Mapping[int, int], broken: tuple[int, ...] = (), last: int = UNITS
    ):
        super().__init__()
        self.job, self._lost, self._broken, self._last = job, lost, broken, last
        self.lockstep = Lockstep(job, lambda: None, self._share)
        self.value: tuple[int, ...] = ()
        self.error: BaseException | None = None
        self._replaced: tuple[Any, Any] = (None, None)

    def _share(self, data: bytes, source: int) -> bytes:
        return self.job.channel.stream("share").all_gather(data, "the state")[source]

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        start = 0
        if "new" in self.job.name:
            start, value = json.loads(self.lockstep.enter())
            self.value = tuple(value)
        else:
            self.job.meet()
        for unit in range(start, self._last):
            result = self.lockstep.unit(self._work(unit), self._again(unit), self._give(unit))
            self.value = result

    def _now(self) -> tuple[int, ...]:
        old, new = self._replaced
        return new if self.value == old else self.value

    def _work(self, unit: int) -> Callable[[], tuple[int, ...]]:
        def work() -> tuple[int, ...]:
            if self._lost.get(self.job.number) == unit:
                raise GroupChangedError("in a unit")
            return (*self._now(), 10 * unit + self.job.number)

        return work

    def _again(self, unit: int) -> Callable[[tuple[int, ...]], None]:
        def again(done: tuple[int, ...]) -> None:
            if self.job.number in self._broken:
                raise GroupChangedError("in a unit that is done again")
            self._replaced = done, (*done[:-1], 10 * unit + self.job.number)

        return again

    def _give(self, unit: int) -> Callable[[], bytes]:
        return lambda: json.dumps([unit, self._now()]).encode()


def train(generations: list[tuple[str, ...]], **how: dict[str, Any]) -> dict[str, Process]:
    stores = [LocalStore() for _ in generations]
    processes = {
        n: Process(Job(n, generations, stores), **arguments) for n, arguments in how.items()
    }
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join(SECONDS)
        assert not process.is_alive()
        assert process.error is None, process.error
    return processes


def test_who_is_a_unit_ahead_takes_it_back():
    found = train([("a", "b", "c"), ("a", "b")], a={"lost": {0: 3}}, b={"lost": {0: 2}},
                  c={"lost": {}, "last": 3})  # fmt: skip
    assert found["a"].value == found["b"].value == (0, 10, 21, 31, 41)
    assert found["a"].lockstep.finished == found["b"].lockstep.finished == UNITS


def test_a_second_loss_while_a_unit_is_done_again():
    found = train(
        [("a", "b"), ("a", "b"), ("a", "b")],
        a={"lost": {0: 3}, "broken": (1,)}, b={"lost": {0: 2, 1: 2}},
    )  # fmt: skip
    assert found["a"].value == found["b"].value == (0, 10, 22, 32, 42)


def test_a_second_loss_after_a_unit_was_done_again():
    found = train([("a", "b")] * 3, a={"lost": {0: 3, 1: 3}}, b={"lost": {0: 2, 1: 3}})
    assert found["a"].value == found["b"].value == (0, 10, 21, 32, 42)


def test_who_joins_gets_the_state_of_one_who_is_not_ahead():
    found = train(
        [("a", "b"), ("a", "b", "new")], a={"lost": {0: 3}}, b={"lost": {0: 2}}, new={"lost": {}}
    )
    assert found["a"].value == found["b"].value == found["new"].value == (0, 10, 21, 31, 41)
    assert {p.lockstep.finished for p in found.values()} == {UNITS}


def test_where_nobody_can_join_the_newcomer_says_so():
    stores = [LocalStore(), LocalStore()]
    generations = [("a",), ("a", "new")]
    first = Process(Job("a", generations, stores), {0: 1})
    first._give = lambda unit: None  # type: ignore[method-assign]
    first.start()
    newcomer = Process(Job("new", generations, stores), {})
    newcomer.start()
    newcomer.join(SECONDS)
    first.join(SECONDS)
    assert first.error is None
    with pytest.raises(RuntimeError, match=r"in a step of fit, or in stratagem\.train\.Backup"):
        raise newcomer.error


def test_a_job_that_may_not_change_fails():
    job = Job("a", [("a",)], [LocalStore()])
    job.may_change = False
    process = Process(job, {0: 1})
    process.run()
    assert isinstance(process.error, GroupChangedError)
