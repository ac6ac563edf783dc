"""A job without processes: the coordinator's state among simulated workers and a server."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random

from stratagem.coordinator.consistency import Synchronous
from stratagem.coordinator.instructions import (
    Answer,
    Cancel,
    Commit,
    Counted,
    Dispatch,
    Forget,
    Go,
    Install,
    Instruction,
    Pause,
    Raise,
    Released,
    Resolve,
    Restore,
    Resume,
    Snapshot,
    Wait,
    Wake,
    Warn,
)
from stratagem.coordinator.progress import Progress
from stratagem.coordinator.state import Question, State, Terms


@dataclass(eq=False)
class Task:
    """A closure on a worker, between two messages: first it pulls, then it pushes, then answers."""

    dispatch: Dispatch
    incarnation: int
    pulled: int | None = None
    staleness: int | None = None
    pushed: bool = False
    cancelled: bool = False
    outcome: str = "ok"
    iterator: str | None = None


class Server:
    """Counts the pushes between each pull and push; applies each token once."""

    def __init__(self) -> None:
        self.version = 0
        self.below = 0
        self.applied: dict[int, tuple[str, int] | None] = {}  # Token to lease.
        # By round: token to the version it was computed from.
        self.staged: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.committed = -1
        self.cancelled: set[int] = set()  # Tokens that may be pushed all the same.
        self.stalest = 0

    def push(self, task: Task) -> None:
        """A push arrives; whether it counts, the token and `below` say."""
        token = task.dispatch.token
        self.below = max(self.below, task.dispatch.below)
        if token < self.below or token in self.applied:
            return
        if task.dispatch.round is not None:
            assert task.pulled is not None
            if task.dispatch.round > self.committed:
                self.staged[task.dispatch.round].setdefault(token, task.pulled)
            return
        assert task.pulled is not None
        self.applied[token] = task.dispatch.lease
        if token not in self.cancelled:
            task.staleness = self.version - task.pulled
            self.stalest = max(self.stalest, task.staleness)
            self.version += 1

    def commit(self, commit: Commit, leases: dict[int, tuple[str, int] | None]) -> None:
        """A round is applied, once, with gradients that are all of the present variables."""
        assert sum(commit.weights) == 1 or abs(sum(commit.weights) - 1) < 1e-9
        if commit.round <= self.committed:
            return
        for token in commit.tokens:
            staged = self.staged[commit.round][token]
            assert staged == self.version, "a gradient of older variables"
            assert token not in self.applied
            self.applied[token] = leases[token]
        self.version += 1
        self.committed = commit.round
        for number in [number for number in self.staged if number <= commit.round]:
            del self.staged[number]


class World:
    """Everything around the state. What it may never do is asserted on the way."""

    def __init__(self, terms: Terms, workers: int, resumed: Progress | None = None) -> None:
        self.state = State(terms, 0.0, resumed)
        self.terms = terms
        self.now = 0.0
        self.server = Server()
        self.server_here = True
        self.incarnations = {f"worker {index}": 1 for index in range(workers)}
        self.up: dict[str, int] = {}
        self.held: dict[str, dict[int, Task]] = {}
        self.tasks: list[Task] = []
        self.resolved: dict[int, str] = {}
        self.results: dict[int, object] = {}
        self.counted: Counter[int] = Counter()
        self.batches: Counter[tuple[str, int]] = Counter()
        self.dropped: set[int] = set()
        self.leases: dict[int, tuple[str, int] | None] = {}
        self.tokens: dict[int, int] = {}  # Of closures.
        self.scheduled: set[int] = set()
        self.reads: set[int] = set()  # Closures that push nothing.
        self.needs: dict[int, tuple[str, ...]] = {}  # Iterators that a closure reads.
        self.lengths: dict[str, int] = {}  # Of iterators, for each worker.
        self.read: Counter[tuple[str, int, str]] = Counter()
        self.commits: list[Commit] = []
        self.snapshots: list[int] = []
        self.released: list[str] = []
        self.forgotten: set[str] = set()  # Iterators.
        self.warnings: list[str] = []
        self.installs = 0
        self.woken = True
        self.paused = False
        self.eat(self.state.server_up("ps 0", 1, True, self.now))
        for name in self.incarnations:
            self.rise(name)

    def eat(self, instructions: list[Instruction]) -> None:
        """Carry out what the state says."""
        for each in instructions:
            match each:
                case Dispatch():
                    self._dispatch(each)
                case Cancel():
                    task = self.held.get(each.worker, {}).get(each.closure)
                    if task is not None:
                        task.cancelled = True
                case Commit():
                    self.commits.append(each)
                case Resolve():
                    assert each.closure not in self.resolved, "resolved twice"
                    self.resolved[each.closure] = each.outcome
                    self.results[each.closure] = each.result
                    if each.outcome in ("cancelled", "error"):
                        self.server.cancelled.add(self.tokens.get(each.closure, each.closure))
                case Counted():
                    self._counted(each)
                case Pause():
                    assert not self.paused
                    self.paused = True
                case Resume():
                    assert self.paused
                    self.paused = False
                case Restore():
                    self.eat(self.state.restored(each.server, self.now))
                case Snapshot():
                    self.snapshots.append(each.number)
                case Released():
                    self.released.append(each.worker)
                case Forget():
                    assert each.iterator not in self.forgotten, "forgotten twice"
                    self.forgotten.add(each.iterator)
                case Install():
                    self.installs += 1
                case Wake():
                    self.woken = True
                case Warn():
                    self.warnings.append(each.text)
                case _:
                    raise AssertionError(each)

    def _dispatch(self, dispatch: Dispatch) -> None:
        assert not self.paused, "dispatched while a server is lost"
        held = self.held[dispatch.worker]
        assert dispatch.worker in self.up, "dispatched to a lost worker"
        assert dispatch.closure not in held, "twice on one worker"
        assert len(held) < self.terms.depth, "more than its depth"
        needs = self.needs.get(dispatch.closure, ())
        assert not self.forgotten.intersection(needs), "its iterator is forgotten"
        known = self.leases.setdefault(dispatch.token, dispatch.lease)
        assert known == dispatch.lease, "a token with two batches"
        assert self.counted[dispatch.token] == 0, "dispatched after it was counted"
        self.tokens[dispatch.closure] = dispatch.token
        self.server.cancelled.discard(dispatch.token)  # A batch that was given back goes out again.
        task = Task(dispatch, self.up[dispatch.worker])
        held[dispatch.closure] = task
        self.tasks.append(task)

    def _counted(self, counted: Counted) -> None:
        self.counted[counted.token] += 1
        assert self.counted[counted.token] == 1, "counted twice"
        if counted.lease is not None:
            self.batches[tuple(counted.lease)] += 1
            assert self.batches[tuple(counted.lease)] == 1, "a batch counted twice"
        if counted.dropped:
            self.dropped.add(counted.token)

    # What happens to workers.

    def rise(self, name: str, anew: bool = False) -> None:
        """A worker is there (again), as a new process or as the one it was."""
        if anew:
            self.incarnations[name] += 1
        if name not in self.up or anew:
            self.held[name] = {}
        self.up[name] = self.incarnations[name]
        self.eat(self.state.worker_up(name, self.incarnations[name], self.now))

    def fall(self, name: str, dead: bool) -> None:
        """A worker is lost; one that is not dead goes on, unheard for now."""
        if self.up.pop(name, None) is None:
            return
        self.held[name] = {}
        if dead:
            self.tasks = [task for task in self.tasks if task.dispatch.worker != name]
        self.eat(self.state.worker_down(name, "silent", self.now))

    def go_on(self, task: Task) -> None:
        """A task does the next thing that it has to do."""
        dispatch = task.dispatch
        if not task.pushed and task.cancelled and task.outcome == "ok":
            task.outcome = "aborted"
        if not self.server_here and not task.pushed and task.outcome == "ok":
            task.outcome = "aborted"
        if task.outcome == "ok" and task.pulled is None:
            self._pull(task)
        elif task.outcome == "ok" and not task.pushed:
            task.pushed = True
            if dispatch.closure not in self.reads:
                self.server.push(task)
        else:
            self._answer(task)

    def _pull(self, task: Task) -> None:
        task.pulled = self.server.version
        for iterator in self.needs.get(task.dispatch.closure, ()):
            key = (task.dispatch.worker, task.incarnation, iterator)
            if self.read[key] >= self.lengths[iterator]:
                task.outcome, task.iterator = "data-ended", iterator
                return
            self.read[key] += 1

    def _answer(self, task: Task) -> None:
        self.tasks.remove(task)
        name = task.dispatch.worker
        if self.up.get(name) == task.incarnation:
            self.held[name].pop(task.dispatch.closure, None)
        result = ValueError(task.dispatch.closure) if task.outcome == "error" else None
        self.eat(
            self.state.finished(
                name,
                task.incarnation,
                task.dispatch.closure,
                task.outcome,  # type: ignore[arg-type]
                self.now,
                result=result,
                staleness=task.staleness,
                rows=4,
                iterator=task.iterator,
            )
        )

    def commit(self) -> None:
        """The servers have carried out the oldest commit."""
        commit = self.commits.pop(0)
        self.server.commit(commit, self.leases)
        self.eat(self.state.committed(commit.round, self.now))

    def lose_server(self) -> None:
        """The server is lost with what is staged in it."""
        self.server_here = False
        self.server.staged.clear()
        self.commits.clear()
        self.eat(self.state.server_down("ps 0", "killed", self.now))

    def restore_server(self, incarnation: int) -> None:
        """It is back, empty, and restored."""
        self.server_here = True
        self.eat(self.state.server_up("ps 0", incarnation, False, self.now))

    # The program.

    def ask(self, question: Question) -> Answer:
        """One question; a caller that was told to wait asks when it was woken."""
        answer, out = self.state.ask(question, self.now)
        self.woken = not isinstance(answer, Wait)
        self.eat(out)
        return answer

    def schedule(
        self, dataset: str | None = None, iterators: tuple[str, ...] = (), pushes: bool = True
    ) -> int | None:
        """Schedule one closure, if the state says so."""
        if not isinstance(self.ask("schedule"), Go):
            return None
        number, out = self.state.schedule(self.now, iterators, dataset, pushes)
        self.scheduled.add(number)
        if not pushes:
            self.reads.add(number)
        self.needs[number] = iterators
        self.eat(out)
        return number

    def run(self, random: Random, limit: int = 3_000) -> list[BaseException]:
        """Heal everything and join; the errors that join raised."""
        errors: list[BaseException] = []
        self.server_here = True
        if self.paused:
            self.restore_server(10**6)
        for name in self.incarnations:
            self.rise(name)
        answer = self.ask("join")
        for _ in range(limit):
            if isinstance(answer, Go):
                return errors
            if isinstance(answer, Raise):
                errors.append(answer.error)
                answer = self.ask("join")
                continue
            if self.woken:
                answer = self.ask("join")
                assert not isinstance(answer, Wait) or not self.woken
                continue
            self.now += 0.01
            if self.commits and (random.random() < 0.5 or not self.tasks):
                self.commit()
            elif self.tasks:
                self.go_on(random.choice(self.tasks))
            else:
                self.now += 1.0
                self.eat(self.state.tick(self.now))
        raise AssertionError("join does not end")

    def check(self) -> None:
        """What must hold after a join."""
        assert self.state.unfinished == 0
        assert set(self.resolved) == self.scheduled, "each closure is resolved exactly once"
        pushed = {token for token in self.counted if token not in self.reads}
        applied = set(self.server.applied)
        assert pushed - self.dropped <= applied, "counted, and not applied"
        assert not self.dropped & applied, "dropped, and applied"
        used = Counter(lease for lease in self.server.applied.values() if lease is not None)
        assert all(count == 1 for count in used.values()), "a batch applied twice"
        if not isinstance(self.terms.consistency, Synchronous):
            assert not self.dropped
