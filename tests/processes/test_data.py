"""What the workers of a job are given, on real processes: rows 49 and 50, R06, R34, R35, R37."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import stratagem

pytest.importorskip("grain", reason="Grain datasets are optional")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import inputs
from jobs import run_job

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    start = 0
    for i, rows in enumerate([5, 3, 0, 7]):
        np.save(directory / f"{i}.npy", np.arange(start, start + rows, dtype="int32"))
        start += rows
    return run_job("sharding", 2, 1, str(directory))


def both(workers, part, name):
    return [worker[part][name] for worker in workers]


def rows(steps):
    return sorted(row for step in steps for row in step)


def test_off_gives_every_row_to_each_worker_in_pieces_of_a_replica(workers):
    for own in both(workers, "policies", "off"):
        assert own == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12, 13]]
    assert both(workers, "policies", "off described") == [14, 14]


def test_off_rotates_uneven_pieces_by_worker(workers):
    first, second = both(workers, "policies", "off pieces")
    assert first == [[0, 1, 2], [3, 4]] * 2
    assert second == [[0, 1], [2, 3, 4]] * 2


def test_data_shares_the_rows_of_each_batch(workers):
    first, second = both(workers, "policies", "data")  # row 49
    assert first == [[0, 1, 2, 3], [8, 9, 10]]
    assert second == [[4, 5, 6, 7], [11, 12, 13]]
    assert both(workers, "policies", "generator") == [[[0, 1], [1, 2]], [[2], [3]]]


def test_each_worker_describes_what_it_was_given(workers):
    for index, (described,) in enumerate(both(workers, "policies", "described")):
        first_row = 4 * index
        assert f"worker={index}, policy=<AutoShardPolicy.DATA: 2>" in described
        assert "steps=2, rows=7, rows_per_replica=(7,)" in described
        assert f"first_rows=({first_row}, {first_row + 1}, " in described
    assert all("(None,)" in spec for spec in both(workers, "policies", "spec"))


def test_one_log_line_says_policy_files_and_rows_per_worker(workers):
    for worker in workers:
        assert (
            "Input: policy FILE, chosen by AUTO for 4 files, each worker reads its own, 2+2 files; "
            "2 workers, 2 replicas; first batch of 6 rows dealt as 2 | 4." in worker["lines"]
        )
        assert (
            "Input: policy AUTO, rows of each batch split by rule CEIL, each worker reads all and "
            "keeps its own; 2 workers, 2 replicas; first batch of 3 rows dealt as 2 | 1."
            in worker["lines"]
        )


def test_policies_that_mean_nothing_here_are_refused(workers):
    for text in both(workers, "policies", "HINT"):
        assert text.startswith("NotImplementedError: Expected AUTO, FILE, DATA or OFF")
        assert "distribute_datasets_from_function" in text
    for text in both(workers, "policies", "FILE of arrays"):
        assert "ValueError: Expected a dataset made of files for policy FILE. Got arrays" in text


def test_a_worker_without_elements_learns_what_they_are_like(workers):
    assert both(workers, "functions", "only chief") == [[[[1, 2], [1]]], [[[0, 2], [0]]]]
    assert both(workers, "functions", "again") == [1, 1]


def test_an_error_of_one_dataset_reaches_all_workers_at_the_same_step(workers):
    assert both(workers, "functions", "before the failure") == [[[0, 1]]] * 2
    first, second = both(workers, "functions", "failure")
    assert second == "OSError: the disk is gone"
    assert "Expected every worker to read its data. Got worker 1 at" in first
    assert "OSError: the disk is gone" in first
    first, second = both(workers, "functions", "no array")
    assert "TypeError: Expected arrays of numbers" in second
    assert "TypeError: Expected arrays of numbers" in first


def test_functions_that_do_not_fit_together(workers):
    for text in both(workers, "functions", "other kind"):
        assert "JobMismatchError: Expected elements of the same structure" in text
        assert "worker 0: PyTreeDef(*) of float32" in text
        assert "worker 1: PyTreeDef((*,)) of int32" in text
    for text in both(workers, "functions", "empty"):
        assert "ValueError: Expected at least one batch" in text


def test_elements_without_rows_end_with_the_shortest(workers):
    assert both(workers, "functions", "scalars") == [[0, 1], [0, 1]]
    assert any("the last 1 element of the dataset function went unused" in line
               for line in workers[0]["lines"])  # fmt: skip


def test_per_replica_functions_know_their_replica(workers):
    assert both(workers, "functions", "per replica") == [[[0, 2]], [[1, 2]]]


def test_processes_that_read_other_batches_are_told(workers):
    for text in both(workers, "same_batches", "own data"):
        assert "JobMismatchError: Expected every process to read the same global batches" in text
        assert "worker 0 at" in text
        assert "worker 1 at" in text
        assert "Give the shuffle of the dataset a seed" in text
    for text in both(workers, "same_batches", "own order"):
        assert "JobMismatchError" in text
        assert "of 12 (CRC" in text
    for text, epoch in both(workers, "same_batches", "own second epoch"):
        assert "JobMismatchError: Expected every process to read the same" in text
        assert epoch == 1
    assert both(workers, "same_batches", "same") == [[[0, 1]], [[2, 3]]]


@pytest.mark.parametrize(("given", "read"), [("plain", "read"), ("grain", "grain read")])
def test_a_worker_reads_only_its_rows_of_a_source_by_number(workers, given, read):
    for worker in workers:
        assert worker["by_number"][read] == [r for step in worker["by_number"][given] for r in step]
    first, second = both(workers, "by_number", read)
    assert sorted(first + second) == list(range(11))


def test_each_worker_opens_its_own_files(workers):
    assert both(workers, "files", "own files") == [["0.npy", "2.npy"], ["1.npy", "3.npy"]]
    assert both(workers, "files", "policy") == ["FILE", "FILE"]
    assert both(workers, "files", "rows") == [5, 10]
    first, second = both(workers, "files", "own")
    assert [len(a + b) for a, b in zip(first, second, strict=True)] == [6, 6, 3]
    assert rows(first) + rows(second) == list(range(15))


def test_files_give_the_same_global_batches_by_file_and_by_row(workers):
    steps = [both(workers, "files", name) for name in ("own", "by row")]
    by_file, by_row = ([sorted(a + b) for a, b in zip(*w, strict=True)] for w in steps)
    assert by_file == by_row


def test_files_are_shuffled_anew_on_each_pass(workers):
    passes = [
        [a + b for a, b in zip(*both_passes, strict=True)]
        for both_passes in zip(*both(workers, "files", "shuffled"), strict=True)
    ]
    assert passes[0] != passes[1]
    assert all(rows(steps) == list(range(15)) for steps in passes)


def test_one_file_for_two_workers(workers):  # R35
    (first, _), (second, policy) = both(workers, "files", "one file")
    assert rows(first) + rows(second) == list(range(5))
    assert policy == "DATA"
    for text in both(workers, "files", "FILE"):
        assert "ValueError: Expected at least one file for each worker" in text
        assert "Got 1 file for 2 workers" in text
    for text in both(workers, "files", "interleave"):
        assert "Got interleave=1 files at once for 2 workers" in text


def test_files_that_cannot_be_read_or_differ(workers):
    first, second = both(workers, "files", "broken")
    assert second == "OSError: cannot read 1.npy"
    assert "OSError: cannot read 1.npy" in first
    for text in both(workers, "files", "other files"):
        assert "JobMismatchError: Expected the same names of files" in text
    for text in both(workers, "files", "empty"):
        assert "ValueError: Expected at least one batch" in text


def test_a_lost_step_is_dealt_again_and_a_state_goes_on(workers):
    for part, given, resumed in [("files", "rest", "resumed")]:
        assert both(workers, part, given) == both(workers, part, resumed)
    for first, again in both(workers, "files", "first"):
        assert first == again
    for lost, again in both(workers, "positions", "lost"):
        assert lost == again
    for rest, resumed in both(workers, "positions", "rest"):
        assert rest == resumed
        assert len(rest) == 4
    assert both(workers, "positions", "dealt") == [[[1], [2], [3]]] * 2


def test_workers_with_data_of_their_own_cannot_take_over(workers):
    for text in both(workers, "functions", "redistribute"):
        assert "NotImplementedError: Expected a dataset whose batches every worker can read" in text
        assert "policy AUTO, DATA or FILE" in text
    for text in both(workers, "positions", "other workers"):
        assert "NotImplementedError: Expected the 3 workers and 2 replicas" in text


def test_a_pass_that_is_left_leaves_no_thread(workers):
    for worker in workers:
        assert worker["threads"] == {"left": 0, "running": 1, "closed": 0, "after": 0}


# Fewer where more processes compile.
@pytest.mark.parametrize(
    ("count", "devices", "names"),
    [
        (2, 2, inputs.ALL),
        pytest.param(
            4, 1, ("arrays", "grain, each reads its own", "files"), marks=pytest.mark.slow
        ),
    ],
)
def test_losses_do_not_depend_on_the_number_of_workers(count, devices, names, alone, tmp_path):
    inputs.write_files(tmp_path)
    for worker in run_job("inputs", count, devices, str(tmp_path), *names):
        assert set(worker) == set(names)
        for name, got in worker.items():
            for what, values in got.items():
                np.testing.assert_allclose(
                    values, alone[name][what], rtol=2e-5, atol=1e-6, err_msg=name
                )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    inputs.write_files(directory)
    return inputs.curves(stratagem.OneDeviceStrategy("cpu:0"), str(directory))
