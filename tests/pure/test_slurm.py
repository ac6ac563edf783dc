"""Slurm's notations, and the cluster that a job step makes. Values as TensorFlow 2.21 gave them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stratagem.cluster import slurm
from stratagem.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from stratagem.cluster_resolver import SlurmClusterResolver

STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "t02n[13,41],t1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "CUDA_VISIBLE_DEVICES": "",
}


def _resolver(set_gpus: list[str] | None = None, **kwargs: Any) -> SlurmClusterResolver:
    env = STEP | kwargs.pop("env", {})
    seen = [] if set_gpus is None else set_gpus
    return SlurmClusterResolver(**kwargs, env=env, set_visible_gpus=seen.append)


class TestHostlist:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("n1", ["n1"]),
            ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9".split()),
            ("t02n[13,41],t1", ["t02n13", "t02n41", "t1"]),
            ("n[08-11]", ["n08", "n09", "n10", "n11"]),
            ("[1-2]", ["1", "2"]),
            ("n2,n1", ["n2", "n1"]),
            ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
            ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ],
    )
    def test_hosts(self, text, hosts):
        assert expand_hostlist(text) == hosts

    @pytest.mark.parametrize("text", ["", ",", "n1,", "a,,b", "n[1-", "n]", "n[1[2]]", "a b"])
    def test_no_list(self, text):
        with pytest.raises(
            ValueError, match=r"Invalid hostlist format '.*': expected names such as"
        ):
            expand_hostlist(text)

    @pytest.mark.parametrize("ranges", ["", "x", "1-2-3", "3-1", "1,", "-1"])
    def test_no_range(self, ranges):
        with pytest.raises(ValueError, match=rf"format 'n\[{ranges}\]': .* 3-5 in \[{ranges}\]\."):
            expand_hostlist(f"n[{ranges}]")

    def test_tasks(self):
        assert expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
        assert expand_tasks_per_node("2") == [2]

    @pytest.mark.parametrize(("text", "part"), [("", ""), ("2,x", "x"), ("2(3)", r"2\(3\)")])
    def test_no_tasks(self, text, part):
        with pytest.raises(ValueError, match=rf"Invalid tasks-per-node list .* Got '{part}'"):
            expand_tasks_per_node(text)


class TestCluster:
    def test_tensorflows_example(self):
        seen: list[str] = []
        resolver = _resolver(
            seen,
            jobs={"worker": 3, "ps": 1},
            port_base=1337,
            gpus_per_node=2,
            gpus_per_task=1,
        )
        assert resolver.cluster_spec().as_dict() == {
            "ps": ["t02n13:1337"],
            "worker": ["t02n13:1338", "t02n41:1337", "t1:1337"],
        }
        assert resolver.get_task_info() == ("worker", 1)
        assert resolver.master() == "grpc://t02n41:1337"
        assert resolver.num_accelerators() == {"GPU": 1}
        assert set(seen) == {"0"}

    def test_all_are_workers_unless_told(self):
        resolver = _resolver()
        assert resolver.cluster_spec().as_dict() == {
            "worker": ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t1:8888"]
        }
        assert (resolver.task_type, resolver.task_id) == ("worker", 2)

    def test_tasks_per_node(self):
        env = {"SLURM_STEP_NUM_TASKS": "6"}
        resolver = _resolver(tasks_per_node=2, env=env)
        assert resolver.cluster_spec().num_tasks("worker") == 6
        assert resolver.master() == "grpc://t02n41:8888"

    def test_hosts_keep_slurms_order(self):
        # Ranks follow it; sorted as text, n10 would be first and rank 0 get the address of another.
        env = {"SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
        one_each = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": "n10"}
        for kwargs in ({}, {"tasks_per_node": 1}, {"tasks_per_node": {"n10": 1, "n9": 1}}):
            resolver = _resolver(env=env | one_each, **kwargs)
            assert resolver.cluster_spec().as_dict() == {"worker": ["n9:8888", "n10:8888"]}

    def test_hosts_that_slurm_does_not_name_are_sorted(self):
        env = {name: STEP[name] for name in ("SLURM_PROCID", "CUDA_VISIBLE_DEVICES")}
        resolver = SlurmClusterResolver(
            {"worker": 3}, tasks_per_node={"b": 1, "a": 2}, env=env, set_visible_gpus=print
        )
        assert resolver.cluster_spec().as_dict() == {"worker": ["a:8888", "a:8889", "b:8888"]}


class TestGpus:
    @pytest.mark.parametrize(
        ("rank", "visible", "kwargs", "own"),
        [
            ("0", "4,5,6,7", {}, ["4,5"]),
            ("1", "4,5,6,7", {}, ["6,7"]),
            ("1", "4,5,6,7", {"gpus_per_task": 1}, ["5"]),
            ("1", "GPU-a,GPU-b", {}, ["GPU-b"]),
            ("1", "0", {"gpus_per_node": 4}, ["2,3"]),
            ("1", "4,5", {"auto_set_gpu": False}, []),
            ("1", "4,5", {"gpus_per_task": 0}, []),
            ("1", "-1", {}, []),
            ("1", "NoDevFiles", {}, []),
        ],
    )
    def test_each_task_sees_its_share(self, rank, visible, kwargs, own):
        seen: list[str] = []
        env = {"SLURM_PROCID": rank, "CUDA_VISIBLE_DEVICES": visible}
        resolver = _resolver(seen, env=env, **kwargs)
        assert seen == []
        resolver.cluster_spec()
        assert seen == own

    @pytest.mark.parametrize(
        ("script", "count"),
        [("print('GPU 0: A (UUID: x)\\n  MIG 1g\\nGPU 1: A (UUID: y)')", 2), ("print('none')", 0)],
    )
    def test_the_driver_is_asked(self, script, count, monkeypatch):
        monkeypatch.setattr(slurm, "_NVIDIA_SMI", (sys.executable, "-c", script))
        env = {name: value for name, value in STEP.items() if name != "CUDA_VISIBLE_DEVICES"}
        seen: list[str] = []
        resolver = SlurmClusterResolver(env=env, set_visible_gpus=seen.append)
        resolver.cluster_spec()
        assert resolver.num_accelerators() == {"GPU": count // 2}
        assert seen == ["0"] * (count // 2)

    def test_no_driver_no_gpus(self, monkeypatch):
        monkeypatch.setattr(slurm, "_NVIDIA_SMI", ("/nowhere/nvidia-smi",))
        env = {name: value for name, value in STEP.items() if name != "CUDA_VISIBLE_DEVICES"}
        assert SlurmClusterResolver(env=env).num_accelerators() == {"GPU": 0}

    def test_a_broken_driver(self, monkeypatch):
        command = (sys.executable, "-c", "raise SystemExit('no devices')")
        monkeypatch.setattr(slurm, "_NVIDIA_SMI", command)
        env = {name: value for name, value in STEP.items() if name != "CUDA_VISIBLE_DEVICES"}
        with pytest.raises(RuntimeError, match="exit status 1: no devices. Pass gpus_per_node"):
            SlurmClusterResolver(env=env)

    def test_too_few(self):
        with pytest.raises(
            RuntimeError, match=r"a GPU at least for each of the 2 tasks .* Got 1\."
        ):
            _resolver(env={"CUDA_VISIBLE_DEVICES": "3"})
        with pytest.raises(
            RuntimeError,
            match="more GPUs per node than available: .* at most 4 .* Got 2 tasks with 3 each",
        ):
            _resolver(gpus_per_node=4, gpus_per_task=3)


class TestErrors:
    @pytest.mark.parametrize(
        "name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"]
    )
    def test_no_step(self, name):
        env = {key: value for key, value in STEP.items() if key != name}
        with pytest.raises(RuntimeError, match=f"{name} not found .* Start the program with srun"):
            SlurmClusterResolver(env=env)

    def test_no_number(self):
        with pytest.raises(ValueError, match=r"SLURM_PROCID: expected a number\. Got '-1'"):
            _resolver(env={"SLURM_PROCID": "-1"})

    def test_other_tasks_than_assigned(self):
        with pytest.raises(RuntimeError, match=r"Requested 9 tasks but 4 .* jobs=\{'worker': 9\}"):
            _resolver(jobs={"worker": 9})

    def test_a_rank_without_a_place(self):
        with pytest.raises(RuntimeError, match="SLURM_PROCID: expected a rank below 4, .* Got 4"):
            _resolver(env={"SLURM_PROCID": "4"})

    def test_lists_that_do_not_fit(self):
        with pytest.raises(
            RuntimeError, match=r"each of the 3 hosts in .*t02n\[13,41\],t1. Got 2,2"
        ):
            _resolver(env={"SLURM_STEP_TASKS_PER_NODE": "2,2"})

    def test_tasks_dealt_out_in_turn(self):
        with pytest.raises(
            RuntimeError, match="expected t02n41 for rank 2, .* Got t1. .* --distribution=block"
        ):
            _resolver(env={"SLURMD_NODENAME": "t1"})
