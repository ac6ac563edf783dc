"""What the engines are given: Slurm's step and batch script, and the JobSet of Kubernetes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from stratagem.cli.main import main
from stratagem.cluster import tf_config
from stratagem.launcher import ray, slurm, slurm_task
from stratagem.launcher.abstract import Job, LaunchError, Task
from stratagem.launcher.kubernetes import KubernetesLauncher, manifest, to_yaml
from stratagem.launcher.output import Output
from stratagem.recovery.policy import Limits

SCRIPT = str(Path(__file__))


class TestSlurm:
    STEP = {
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "CUDA_VISIBLE_DEVICES": "",
        slurm.JOBS: '{"chief": 1, "worker": 2}',
    }

    def test_the_step(self):
        job = Job(("-m", "train", "--lr", "1"), workers=3, chief=True, gpus_per_worker=2)
        command = slurm.srun_command(job)
        assert command[0] == "srun"
        assert {"--ntasks=4", "--distribution=block", "--gpus-per-task=2"} < set(command)
        at = command.index("stratagem.launcher.slurm_task")
        assert command[at - 2 :] == [
            *(sys.executable, "-m", "stratagem.launcher.slurm_task"),
            *job.program,
        ]

    def test_a_task_finds_out_who_it_is(self):
        told = slurm_task.environment_of_task(self.STEP)
        parsed = tf_config.parse(told.pop("TF_CONFIG"))
        assert (parsed.task_type, parsed.task_id) == ("worker", 1)
        assert parsed.cluster.as_dict() == {"chief": ["n1:8888"], "worker": ["n1:8889", "n2:8888"]}
        assert told == {}

    def test_tasks_of_a_node_share_out_its_gpus(self):
        step = self.STEP | {"SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
        assert slurm_task.environment_of_task(step)["CUDA_VISIBLE_DEVICES"] == "2,3"
        own = step | {slurm.OWN_GPUS: "1", "CUDA_VISIBLE_DEVICES": "1"}
        assert "CUDA_VISIBLE_DEVICES" not in slurm_task.environment_of_task(own)

    def test_the_batch_script_runs_the_same_job(self):
        job = Job(("train.py", "a b"), workers=2, chief=True, limits=Limits(max_restarts=3))
        script = slurm.batch_script(job, "digits")
        lines = script.splitlines()
        assert lines[0] == "#!/bin/bash"
        for option in ("--job-name=digits", "--ntasks=3", "--requeue", "--signal=B:TERM@120"):
            assert f"#SBATCH {option}" in lines
        assert lines[-1] == (
            f"exec {sys.executable} -m stratagem.cli run --on slurm --workers 2 --chief "
            "--max-restarts 3 --grace 30 train.py 'a b'"
        )
        assert "--requeue" not in slurm.batch_script(Job(("t.py",)), "x")

    def test_outside_an_allocation_a_script_is_written(self, tmp_path, monkeypatch, capsys):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        path = tmp_path / "job.sh"
        assert main(["run", "--on", "slurm", "--workers", "2", "--output", str(path), SCRIPT]) == 0
        assert path.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=stratagem\n")
        assert capsys.readouterr().out == ""
        assert main(["run", "--on", "slurm", "--workers", "2", SCRIPT]) == 0
        assert capsys.readouterr().out == path.read_text()

    def test_a_file_that_cannot_be_written(self, tmp_path, monkeypatch, capsys):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        assert main(["run", "--on", "slurm", "--output", str(tmp_path), SCRIPT]) == 2
        assert "--output: expected a file that can be written. Got" in capsys.readouterr().err

    def test_no_srun(self, tmp_path):
        environment = {"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}
        with pytest.raises(
            LaunchError, match=r"expected srun on the PATH, for SLURM_JOB_ID is set"
        ):
            slurm.SlurmLauncher(environment).launch(Job(("t.py",)))

    @pytest.mark.parametrize("job", [Job(("t.py",), servers=1), Job(("t.py",), evaluator=True)])
    def test_tasks_that_do_not_end(self, job):
        with pytest.raises(LaunchError, match=r"--on slurm: expected a chief and workers only"):
            slurm.SlurmLauncher({}).launch(job)


# As much of the API as is used, so that a misspelt or misplaced field is an error.
def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_COUNT = {"type": "integer", "minimum": 0}
_ENV = {
    "oneOf": [
        _object(["name", "value"], name=_TEXT, value={"type": "string"}),
        _object(
            ["name", "valueFrom"],
            name=_TEXT,
            valueFrom=_object(["fieldRef"], fieldRef=_object(["fieldPath"], fieldPath=_TEXT)),
        ),
        _object(
            ["name", "valueFrom"],
            name=_TEXT,
            valueFrom=_object(
                ["secretKeyRef"], secretKeyRef=_object(["name", "key"], name=_LABEL, key=_TEXT)
            ),
        ),
    ]
}
_PORT = _object(["containerPort"], containerPort={"type": "integer", "maximum": 65535})
_CONTAINER = _object(
    ["name", "image", "command"],
    name=_LABEL,
    image=_TEXT,
    command={"type": "array", "items": _TEXT, "minItems": 1},
    env={"type": "array", "items": _ENV},
    ports={"type": "array", "items": _PORT},
    resources=_object(["limits"], limits={"type": "object"}),
)
_POD = _object(
    ["spec"],
    spec=_object(
        ["restartPolicy", "containers"],
        # Jobs with a podFailurePolicy allow no other.
        restartPolicy={"const": "Never"},
        terminationGracePeriodSeconds=_COUNT,
        containers={"type": "array", "items": _CONTAINER, "minItems": 1, "maxItems": 1},
    ),
)
_POD_RULE = _object(
    ["action", "onExitCodes"],
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=_object(
        ["operator", "values"],
        containerName=_LABEL,
        operator={"enum": ["In", "NotIn"]},
        values={"type": "array", "items": _COUNT, "minItems": 1},
    ),
)
_JOB = _object(
    ["spec"],
    spec=_object(
        ["completions", "parallelism", "completionMode", "template"],
        completions=_COUNT,
        parallelism=_COUNT,
        completionMode={"enum": ["Indexed", "NonIndexed"]},
        backoffLimit=_COUNT,
        backoffLimitPerIndex=_COUNT,
        maxFailedIndexes=_COUNT,
        podFailurePolicy=_object(["rules"], rules={"type": "array", "items": _POD_RULE}),
        template=_POD,
    ),
)
_ACTIONS = [
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
]
_JOB_SET_RULE = _object(
    ["action"],
    name=_TEXT,
    action={"enum": _ACTIONS},
    onJobFailureReasons={
        "type": "array",
        "items": {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        },
    },
    targetReplicatedJobs={"type": "array", "items": _LABEL},
)
JOB_SET = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(["name"], name=_LABEL, namespace=_LABEL),
    spec=_object(
        ["replicatedJobs"],
        network=_object(
            [],
            enableDNSHostnames={"type": "boolean"},
            subdomain=_LABEL,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=_object(
            ["operator"],
            operator={"enum": ["All", "Any"]},
            targetReplicatedJobs={"type": "array", "items": _LABEL},
        ),
        failurePolicy=_object(
            [], maxRestarts=_COUNT, rules={"type": "array", "items": _JOB_SET_RULE}
        ),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["name", "template"],
                name=_LABEL,
                replicas={"type": "integer", "minimum": 1},
                template=_JOB,
            ),
        },
    ),
)
JOBS = [
    Job(("train.py",)),
    Job(("-m", "train", "--lr", "0.1"), workers=2, limits=Limits(max_restarts=3)),
    Job(("train.py",), workers=3, chief=True, evaluator=True, gpus_per_worker=8),
    Job(("train.py",), workers=2, chief=True, servers=2, devices_per_worker=2),
]


def _pods(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        each["name"]: each["template"]["spec"]["template"]["spec"]["containers"][0]
        for each in found["spec"]["replicatedJobs"]
    }


class TestKubernetes:
    @pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(job.counts()))
    def test_the_manifest_is_valid(self, job):
        found = manifest(job, "image:1", "digits")
        jsonschema.Draft202012Validator.check_schema(JOB_SET)
        jsonschema.validate(found, JOB_SET)
        assert yaml.safe_load(to_yaml(found)) == found
        names = _pods(found)
        spec = found["spec"]
        for target in spec["successPolicy"]["targetReplicatedJobs"]:
            assert target in names
        for each in spec["replicatedJobs"]:
            rule = each["template"]["spec"]["podFailurePolicy"]["rules"][0]
            assert rule["onExitCodes"]["containerName"] == names[each["name"]]["name"]

    def test_the_schema_refuses_what_is_misspelt(self):
        found = manifest(JOBS[0], "image:1", "digits")
        found["spec"]["network"]["enableDnsHostnames"] = True
        with pytest.raises(jsonschema.ValidationError, match="enableDnsHostnames"):
            jsonschema.validate(found, JOB_SET)

    def test_each_pod_is_told_who_it_is(self):
        pod = _pods(manifest(JOBS[1], "image:1", "digits"))["worker"]
        assert pod["command"] == ["python", "-m", "train", "--lr", "0.1"]
        names = [variable["name"] for variable in pod["env"]]
        index, config = names.index("STRATAGEM_TASK_INDEX"), names.index("TF_CONFIG")
        assert index < config  # Only what stands above is put in.
        text = pod["env"][config]["value"].replace("$(STRATAGEM_TASK_INDEX)", "1")
        parsed = tf_config.parse(text)
        assert (parsed.task_type, parsed.task_id) == ("worker", 1)
        assert parsed.cluster.as_dict() == {
            "worker": ["digits-worker-0-0.digits:2222", "digits-worker-0-1.digits:2222"]
        }

    def test_the_service_has_a_pod_of_its_own(self):
        pods = _pods(manifest(JOBS[1], "image:1", "digits"))
        command = ["python", "-m", "stratagem.cluster.service", "0.0.0.0:2222", "2"]
        assert pods["coordination"]["command"] == command
        told = {each["name"]: each.get("value") for each in pods["worker"]["env"]}
        assert told["STRATAGEM_COORDINATION"] == "digits-coordination-0-0.digits:2222"
        assert "coordination" not in _pods(manifest(JOBS[3], "image:1", "digits"))

    def test_preemption_does_not_count(self):
        policy = manifest(JOBS[1], "image:1", "digits")["spec"]["failurePolicy"]
        assert policy["maxRestarts"] == 3
        assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSetAndIgnoreMaxRestarts"]
        none = manifest(JOBS[0], "image:1", "digits")["spec"]["failurePolicy"]
        assert none == {"maxRestarts": 0}

    def test_who_decides_that_it_is_done(self):
        done = [manifest(job, "i", "n")["spec"]["successPolicy"] for job in JOBS]
        assert [policy["targetReplicatedJobs"] for policy in done] == [
            ["worker"],
            ["worker"],
            ["chief", "worker"],
            ["chief"],
        ]

    def test_with_servers_pods_are_started_again_alone(self):
        job = replace(JOBS[3], limits=Limits(max_restarts=0, task_restarts=3))
        found = manifest(job, "image:1", "digits", Path("/state"))
        jsonschema.validate(found, JOB_SET)
        assert found["spec"]["failurePolicy"] == {"maxRestarts": 0}
        specs = {each["name"]: each["template"]["spec"] for each in found["spec"]["replicatedJobs"]}
        assert {name: spec["backoffLimitPerIndex"] for name, spec in specs.items()} == {
            "chief": 0,
            "worker": 3,
            "ps": 3,
        }
        actions = [s["podFailurePolicy"]["rules"][0]["action"] for s in specs.values()]
        assert actions == ["FailJob", "Ignore", "Ignore"]
        pods = _pods(found)
        assert pods["chief"]["command"] == ["python", "train.py"]
        assert pods["ps"]["command"] == ["python", "-m", "stratagem.cli", "serve"]
        told = {each["name"]: each for each in pods["ps"]["env"]}
        assert told["STRATAGEM_STATE_DIR"]["value"] == "/state"
        secret = told["STRATAGEM_CLUSTER_KEY"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "digits-key", "key": "STRATAGEM_CLUSTER_KEY"}
        attempt = told["STRATAGEM_ATTEMPT"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert "job-index-failure-count" in attempt

    def test_the_command_says_how_to_make_the_key(self, capsys):
        arguments = ["--on", "kubernetes", "--image", "i", "--name", "digits", "--ps", "1", "t.py"]
        assert main(["run", *arguments]) == 0
        out, err = capsys.readouterr()
        jsonschema.validate(yaml.safe_load(out), JOB_SET)
        assert "kubectl create secret generic digits-key --from-file=STRATAGEM_CLUSTER_KEY" in err

    def test_gpus_for_what_trains(self):
        pods = _pods(manifest(JOBS[2], "i", "n"))
        assert pods["worker"]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert "resources" not in pods["evaluator"]

    def test_the_command_writes_it(self, capsys):
        assert main(["run", "--on", "kubernetes", "--image", "i", "--workers", "2", "t.py"]) == 0
        jsonschema.validate(yaml.safe_load(capsys.readouterr().out), JOB_SET)

    @pytest.mark.parametrize("name", ["Digits", "1digits", "a_b", "a" * 41, "a-"])
    def test_a_name_that_cannot_be_a_host(self, name):
        with pytest.raises(LaunchError, match=rf"--name: expected at most 40 .*Got '{name}'"):
            KubernetesLauncher("i", name).launch(Job(("t.py",)))

    def test_without_yaml(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "yaml", None)
        with pytest.raises(LaunchError, match=r"expected the package PyYAML\. Got none\."):
            KubernetesLauncher("i").launch(Job(("t.py",)))


class TestRay:
    def test_without_ray(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(LaunchError, match=r"--on ray: expected the package ray\. Got none\."):
            ray.RayLauncher({}, Output([Task("worker", 0)])).launch(Job(("t.py",)))
