"""A real Slurm cluster on one machine: Debian's munged, slurmctld, and one slurmd a node.

    with SlurmCluster(folder, ["n1", "n2"]) as cluster:
        job = cluster.submit("job.sbatch", "--nodes=2")
        cluster.wait_for_state(job, "RUNNING")
        cluster.kill("n2")        # every process of the node, as when its power fails

A node has a host name, a network, processes, an /etc/hosts and a /dev/shm of its own (namespaces), and shares the disk
with the others. The controller has a network of its own as well, where the commands run. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.e2e import namespaces
from tests.programs import FETCHED, program
from tests.waiting import wait_for

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "munged", "mungekey", "sbatch", "srun", "scontrol", "sinfo")
CONTROLLER = 0
"""Its number in the network; the nodes follow."""
DEADLINE_S = 240.0
"""Longer than for one launch: the recipe starts three programs one after the other on each node."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
NODE = """
printf '%s' "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
"$3" -D -N "$1" -d "$4" & wait
"""
"""Set up a node's namespaces and run its slurmd; the shell stays the first process, which reaps the others."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdTimeout=20
KillWait=120
ReturnToService=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def why_not() -> str:
    """Why no cluster can run here; empty if it can."""
    if os.geteuid() != 0:
        return "Slurm's nodes on one machine need root"
    missing = [
        name for name in ("slurmctld", "slurmd", "slurmstepd", "munged", "mungekey", "sbatch") if not _path(name)
    ]
    if missing:
        return f"needs {', '.join(missing)}: sh tests/fetch_programs.sh .programs"
    if why := namespaces.why_not():
        return why
    tried = subprocess.run(
        [*ISOLATED, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True, check=False
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class SlurmCluster:
    """`submit`, `ask` and `kill` act on a cluster that runs while the context lasts."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder = folder
        self.nodes = nodes
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        } | {"SLURM_CONF": str(folder / "slurm.conf")}
        commands = {str(Path(_path(name)).parent) for name in ("sbatch", "munged")}
        path = [str(Path(sys.executable).parent), *sorted(commands), self.environment["PATH"]]
        self.environment["PATH"] = ":".join(path)
        if _plugins() is not None:
            self.environment["LD_LIBRARY_PATH"] = f"{_plugins()}:{_plugins().parent}"
        self._network = namespaces.Network(1 + len(nodes))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def ask(self, *command: str) -> str:
        """Output of one of Slurm's commands; it must succeed."""
        done = subprocess.run(
            [*self._network.on(CONTROLLER), *command],
            capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Number of the job that `sbatch` submits."""
        return self.ask("sbatch", "--parsable", *arguments).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def wait_for_state(self, job: str, state: str) -> dict[str, str]:
        """Wait until the job is in this state; AssertionError if it ends in another."""

        def is_there() -> bool:
            now = self.job(job)["JobState"]
            assert now == state or now not in OVER, f"job {job} is {now}, not {state}\n{self.logs()}"
            return now == state

        wait_for(is_there, f"{state} of job {job}", self, DEADLINE_S)
        return self.job(job)

    def kill(self, node: str) -> None:
        """SIGKILL to every process of a node."""
        daemon = self._daemons.pop(node)
        daemon.kill()  # with `unshare` the kernel ends the first process of the namespace, and so all of them
        daemon.wait()

    def has_ended(self) -> bool:
        """True if a daemon that should run does not."""
        return any(daemon.poll() is not None for daemon in self._daemons.values())

    def logs(self) -> str:
        """The end of every log file, for a failed assertion."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def __enter__(self) -> SlurmCluster:
        self._network.__enter__()
        try:
            self._configure()
            self._start_controller()
            for node in self.nodes:
                self._start_node(node)
            ready = {(node, "idle") for node in self.nodes}
            wait_for(lambda: self._states() == ready, "idle nodes", self)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for daemon in reversed([*self._daemons.values()]):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        self._network.__exit__(kind, error, at)

    def _configure(self) -> None:
        address = self._network.address(CONTROLLER)
        lines = [CONFIGURATION.format(address=address, folder=self.folder)]
        if _plugins() is not None:
            lines.append(f"PluginDir={_plugins()}")
        addresses = {node: self._network.address(number) for number, node in enumerate(self.nodes, start=1)}
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} CPUs=64 RealMemory=1000"
            for node, address in addresses.items()
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # No cgroup is used; without this, slurmd looks for a mounted file system of them and fails without one.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = {"localhost": "127.0.0.1", **addresses}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()

    def _start_controller(self) -> None:
        subprocess.run(
            [_path("mungekey"), "--create", "--keyfile", str(self.folder / "munge.key")],
            env=self.environment,
            check=True,
        )
        files = ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"), ("seed-file", "seed")
        where = [f"--{option}={self.folder / name}" for option, name in files]
        # --force: the folders of a test are closed to others, which munged does not expect.
        self._start(
            CONTROLLER,
            "munged",
            _path("munged"),
            "--foreground",
            "--force",
            *where,
            f"--log-file={self.folder}/munge.log",
        )
        wait_for((self.folder / "munge.socket").exists, "munge's socket", self)
        self._start(CONTROLLER, "slurmctld", _path("slurmctld"), "-D")

    def _start_node(self, node: str) -> None:
        programs = _path("slurmd"), _path("slurmstepd")
        self._start(
            1 + self.nodes.index(node),
            node,
            *ISOLATED,
            "sh",
            "-c",
            NODE,
            "sh",
            node,
            str(self.folder / "hosts"),
            *programs,
        )

    def _start(self, place: int, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*self._network.on(place), *command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _states(self) -> set[tuple[str, ...]]:
        with contextlib.suppress(AssertionError):  # the controller does not listen yet
            return {tuple(line.split()) for line in self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines()}
        return set()


def _path(name: str) -> str:
    """Path of a daemon or command; Debian adds a suffix to the daemons."""
    return program(f"{name}-wlm") or program(name)


def _plugins() -> Path | None:
    """Folder of the plugins where Slurm is unpacked and not installed."""
    if not Path(_path("slurmctld")).is_relative_to(FETCHED):
        return None
    return next(FETCHED.glob("lib/*/slurm-wlm"))
