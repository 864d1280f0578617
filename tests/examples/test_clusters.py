"""What docs/clusters.md says, as far as one machine can show it: two agents on two hosts, a host that dies, Slurm, manifests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ruamel.yaml import YAML

from harness.hosts import Host, kill, namespaces_work, two_hosts

ROOT = Path(__file__).parents[2]
TRAIN, CHECK, SBATCH = "examples/train_lm.py", "examples/check_hosts.py", "examples/slurm/train.sbatch"
MODEL = {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 16}
TINY = [f"--{name}={value}" for name, value in (MODEL | {"text-bytes": 300_000, "sample-bytes": 5, "eval-every": 1000}).items()]
STEPS = 60
T = TypeVar("T")
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: processes are found in /proc")


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # Other tests keep gloo of this process on the loopback, on which these hosts don't reach each other.
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return inherited | ours | more  # the last of ours: an agent that comes back waits for an address that nobody writes again


def elastic(first: Host, *program: object, ranks: int = 1, restarts: int = 3) -> list[str]:
    """The command of docs/clusters.md for plain hosts, the same on both; it waits shorter for hosts that are gone."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29511", "--rdzv-id=train"]
    return [*torchrun, *meeting, "--rdzv-conf=keep_alive_interval=1", *map(str, program)]


@contextmanager
def agents_on(hosts: Sequence[Host], command: Sequence[str], says: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The command on both hosts, whose output goes to a file; whatever happens, nothing of it is left behind."""
    with says.open("a") as out:
        agents = [host.start(command, environment(), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) for host in hosts]
    try:
        yield agents
    finally:
        for agent in agents:
            kill(agent)


def losses(path: Path) -> dict[int, float]:
    """By step; of a step that was repeated, the last."""
    return {record["step"]: record["loss"] for record in map(json.loads, path.read_text().splitlines())}


def until(found: Callable[[], T | None], seconds: float = 300.0) -> T:
    """What ``found`` returns once that is not None; it asks again, for other processes do what is waited for."""
    end = time.monotonic() + seconds
    while (value := found()) is None:
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.05)  # so that the others have the core
    return value


def line_with(path: Path, pattern: str) -> re.Match[str]:
    """The first match in a file that others write, once it is there."""
    return until(lambda: re.search(pattern, path.read_text()) if path.exists() else None)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run of one rank, which shards nothing."""
    out = tmp_path_factory.mktemp("one_rank")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    flags = ["--out", str(out / "run"), "--json", str(out / "log"), "--steps", str(STEPS)]
    subprocess.run([*torchrun, TRAIN, *TINY, *flags], cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=300)
    return losses(out / "log")


def train_flags(out: Path) -> list[object]:
    flags: list[object] = ["--out", out / "run", "--json", out / "log", "--steps", STEPS, "--checkpoint-every", 5]
    return [TRAIN, *TINY, *flags, "--hsdp", "--resume", "auto"]


@pytest.mark.full
@needs_linux
def test_hsdp_over_two_hosts_trains_as_one_rank_does(one_rank: dict[int, float], tmp_path: Path) -> None:
    says = tmp_path / "says"
    with two_hosts() as hosts, agents_on(hosts, elastic(hosts[0], *train_flags(tmp_path), ranks=2), says) as agents:
        assert [agent.wait(timeout=300) for agent in agents] == [0, 0], says.read_text()
    assert "on 4 x cpu" in says.read_text()
    seen = losses(tmp_path / "log")
    assert seen.keys() == one_rank.keys()
    for step in range(1, 21):  # later, Adam makes steps of rounding
        assert seen[step] == pytest.approx(one_rank[step], abs=1e-4)
    assert seen[STEPS] == pytest.approx(one_rank[STEPS], abs=0.05)


@pytest.mark.slow
@needs_linux
def test_a_host_that_dies_and_comes_back_goes_on_from_the_last_checkpoint(one_rank: dict[int, float], tmp_path: Path) -> None:
    """The agent of the other host stays: its ranks fail, it meets with the new agent, and both start ranks that resume."""
    says = tmp_path / "says"
    with two_hosts() as hosts, agents_on(hosts, command := elastic(hosts[0], *train_flags(tmp_path)), says) as agents:
        line_with(tmp_path / "log", '"step": 20,')  # three checkpoints are complete
        kill(agents[1])
        with agents_on(hosts[1:], command, says) as again:
            assert [agent.wait(timeout=300) for agent in (agents[0], *again)] == [0, 0], says.read_text()
    said = says.read_text()
    resumed = re.search(r"going on after step (\d+)", said)
    assert resumed, said
    assert 15 <= int(resumed[1]) < STEPS
    seen = losses(tmp_path / "log")
    assert seen.keys() == one_rank.keys()
    assert seen[STEPS] == pytest.approx(one_rank[STEPS], abs=0.05)


@pytest.mark.slow
@needs_linux
def test_the_check_before_a_start_measures_links_and_names_the_host_that_fails(tmp_path: Path) -> None:
    def check(*flags: str) -> tuple[list[int], str]:
        says = tmp_path / "says"
        says.write_text("")
        with two_hosts() as hosts, agents_on(hosts, elastic(hosts[0], CHECK, *flags, restarts=0), says) as agents:
            return [agent.wait(timeout=200) for agent in agents], says.read_text()

    host = "node-a" if namespaces_work() else r"\S+"
    statuses, said = check("--mib", "4")
    assert statuses == [0, 0], said
    assert re.search(rf"check_hosts: {host}: 1 x cpu, \d+\.\d Gbit/s to the next host", said)
    statuses, said = check("--mib", "4", "--gpus", "8")
    assert 0 not in statuses
    assert re.search(rf"check_hosts: {host}: has 0 GPUs, and should have 8", said)
    statuses, said = check("--mib", "4", "--min-gbps", "1e9")
    assert 0 not in statuses
    assert re.search(rf"check_hosts: {host}: sends \S+ Gbit/s to the next host, less than 1e\+09", said)


# ---- Slurm --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_batch_script_is_bash_that_shellcheck_finds_nothing_in() -> None:
    subprocess.run(["bash", "-n", ROOT / SBATCH], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / SBATCH], check=True)


SRUN = """#!/usr/bin/env bash
# srun for two nodes on loopback: the task's command on each, signals handed on.
shift # --kill-on-bad-exit=1
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
trap 'kill -USR2 $first $second' USR2
status=0
for each in $first $second; do
    while :; do
        wait "$each"; ended=$?
        kill -0 "$each" 2>/dev/null || break
    done
    [ "$ended" = 0 ] || status=$ended
done
exit "$status"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >requeued ;;
esac
"""


@pytest.mark.slow
@needs_linux
def test_the_batch_script_saves_and_queues_itself_again_when_its_time_is_nearly_up(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands; the next test has Slurm itself."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "77", "JOB_NAME": "train_lm", "JOB_NODELIST": "node-a,node-b", "NNODES": "2"}
    env = environment(**{f"SLURM_{name}": value for name, value in slurm.items()}, **ours(tmp_path))
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"

    def start(log: str, **options: Any) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("w") as out:
            command = ["bash", str(ROOT / SBATCH), *job_flags(tmp_path)]
            return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, **options)

    job = start("first")
    line_with(tmp_path / "log", '"step": 10,')
    job.send_signal(signal.SIGUSR2)
    said = (job.wait(timeout=300), (tmp_path / "first").read_text())
    assert said[0] == 0, said
    assert (tmp_path / "requeued").read_text() == "77\n"
    stopped = max(losses(tmp_path / "log"))
    assert f"saved step_{stopped:06d}, the job is queued again" in said[1]

    job = start("second")
    assert job.wait(timeout=300) == 0, (tmp_path / "second").read_text()
    assert f"going on after step {stopped}" in (tmp_path / "second").read_text()
    assert losses(tmp_path / "log").keys() == set(range(1, STEPS + 1))


def ours(folder: Path) -> dict[str, str]:
    """The batch script's own variables."""
    programs = {"PROGRAM": str(ROOT / TRAIN), "CHECK": str(ROOT / CHECK), "PYTHON": sys.executable}
    return {"OUT": str(folder / "run"), "RANKS_PER_NODE": "1", **programs}


def job_flags(folder: Path) -> list[str]:
    return [*TINY, "--json", str(folder / "log"), "--steps", str(STEPS), "--checkpoint-every", "1000", "--hsdp"]


SLURM_CONF = """
ClusterName=two
SlurmctldHost={a.name}({a.address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
NodeName={a.name} NodeAddr={a.address} State=UNKNOWN
NodeName={b.name} NodeAddr={b.address} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(hosts: tuple[Host, Host], folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of slurmctld and two slurmd; the environment in which its commands find it."""
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(a=hosts[0], b=hosts[1], folder=folder))
    env = environment(SLURM_CONF=str(conf), PATH=os.environ["PATH"] + ":/usr/sbin")
    with ExitStack() as stack:
        for host, daemon in ((hosts[0], "slurmctld"), (hosts[0], "slurmd"), (hosts[1], "slurmd")):
            log = stack.enter_context((folder / f"{daemon}-{host.name}").open("w"))
            stack.callback(kill, host.start([daemon, "-D"], env, stdout=log, stderr=subprocess.STDOUT))
        line_with(folder / f"slurmctld-{hosts[0].name}", "Running as primary")
        sinfo = ("sinfo", "--noheader", "--Node", "--format=%T")
        until(lambda: True if hosts[0].run(*sinfo, environment=env).split() == ["idle", "idle"] else None)
        yield env


@pytest.mark.slow
@pytest.mark.skipif(
    not namespaces_work() or shutil.which("slurmctld", path="/usr/sbin:" + os.environ["PATH"]) is None,
    reason="needs network namespaces, and Debian's packages slurmctld, slurmd and slurm-client",
)
def test_slurm_itself_runs_the_batch_script_on_two_nodes_and_starts_it_again(tmp_path: Path) -> None:
    with two_hosts() as hosts, slurm(hosts, tmp_path) as env:
        env |= ours(tmp_path)
        submit = ["sbatch", "--parsable", "--time=10", f"--output={tmp_path}/job", f"--chdir={tmp_path}", str(ROOT / SBATCH)]
        job = hosts[0].run(*submit, *job_flags(tmp_path), environment=env).strip()

        def in_state(wanted: str) -> bool | None:
            state = hosts[0].run("scontrol", "show", "job", job, environment=env)
            with (tmp_path / "states").open("a") as states:
                states.write(state)
            return f"JobState={wanted}" in state or None

        line_with(tmp_path / "log", '"step": 10,')
        hosts[0].run("scancel", "--signal=USR2", "--batch", job, environment=env)  # what --signal=B:USR2@300 does
        saved = line_with(tmp_path / "job", r"saved step_0*(\d+), the job is queued again")
        # Slurm lets a job that was queued again wait for two minutes: this test takes a few seconds. In the second in which nodes have
        # ended a job they refuse to start it ("Job credential revoked"), and it has failed then.
        until(lambda: in_state("PENDING"))
        hosts[0].run("scontrol", "update", f"JobId={job}", "StartTime=now+5", environment=env)
        until(lambda: in_state("COMPLETED"))
    assert f"job {job}, start 1, on node-a,node-b; checkpoint: step_" in (tmp_path / "job").read_text()
    assert f"going on after step {saved[1]}" in (tmp_path / "job").read_text()
    assert losses(tmp_path / "log").keys() == set(range(1, STEPS + 1))


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_manifests_start_the_training_program_on_every_host(name: str) -> None:
    manifest = YAML(typ="safe").load((ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text())
    if name == "pytorchjob":
        worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
        hosts, template = worker["replicas"], worker["template"]
    else:
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["parallelism"] == job["completions"]
        hosts, template = job["parallelism"], job["template"]
    (container,) = template["spec"]["containers"]
    assert hosts == 2
    command = " ".join(container["command"] + container.get("args", []))
    assert "torchrun" in command
    assert TRAIN in command
    assert "--resume auto" in command or "--resume" in container["command"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in template["spec"]["volumes"]}
