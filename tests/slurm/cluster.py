"""SLURM on this machine: real daemons, nodes that are names, GPUs that are /dev/null.

Needs Debian's slurm-wlm (whose slurmd can be several nodes of one machine), munge, and root. Everything lies in one
folder and listens on this machine's own address only. The processes are children of this one, and end with it.
"""

import os
import re
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

NODES, CPUS, GPUS = 8, 64, 8
CLIENT_SECONDS = 30
START_SECONDS = 30
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

# Each node has more CPUs than the machine: config_overrides. `small` nodes are preempted for jobs in the partition
# `urgent`. Signals reach the processes of a job as on a cluster: proctrack/linuxproc knows them by their parents.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=90
MinJobAge=600
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=small Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=500000 Gres=gpu:{gpus} State=UNKNOWN\n"
)


def free_ports(count: int, address: str) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind((address, 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Cluster:
    """`with Cluster() as cluster`: up when the block begins, gone with all its jobs when it ends."""

    def __init__(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="dllm_slurm_")
        self.folder, self.daemons = Path(self.temporary.name), []
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self.environment["PATH"] += ":/usr/sbin:/sbin"

    def __enter__(self):
        try:
            self._configure()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        self._stop()

    # --- clients --------------------------------------------------------------------------------------------------

    def run(self, *command, check: bool = True, **environment) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *words, **environment) -> int:
        """The new job's number."""
        return int(self.run("sbatch", "--parsable", *words, **environment).stdout)

    def job(self, number: int | str) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", number).stdout))

    def start_now(self, number: int) -> None:
        """A job that was put back has to wait for two minutes, except here."""
        time.sleep(2)  # its old credential is revoked, and with it any new one of the same second
        self.run("scontrol", "update", f"jobid={number}", "starttime=now")

    # --- daemons --------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        address = socket.gethostbyname(host)
        port, *ports = free_ports(1 + NODES, address)
        self.folder.chmod(0o755)  # munge wants everyone to reach its socket
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        text = _CONFIGURATION.format(host=host, address=address, port=port, folder=self.folder)
        for number, node_port in enumerate(ports, 1):
            text += _NODE.format(number=number, host=host, address=address, port=node_port, cpus=CPUS, gpus=GPUS)
        (self.folder / "slurm.conf").write_text(text)
        # GPUs have to be devices: these are copies of /dev/null.
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        files = f"{self.folder}/gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu Flags=nvidia_gpu_env File={files}\n")

    def _start(self) -> None:
        munge = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", f"--socket={self.folder}/munge.socket", *munge)
        self._until(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            self._daemon("slurmd", "-D", "-c", "-N", f"n{number}")
        idle = lambda: self.run("sinfo", "-h", "-p", "all", "-t", "idle", "-o", "%D", check=False).stdout.strip()
        self._until(lambda: idle() == str(NODES))

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "a") as output:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=output, stderr=output))

    def _until(self, condition) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            gone = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if gone or time.monotonic() > deadline:
                logs = (f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"SLURM did not start (ended: {gone})\n" + "\n".join(logs))
            time.sleep(0.1)

    def _stop(self) -> None:
        """Jobs first, or they would outlive the daemons. Then whatever was started with our configuration."""
        for daemon in reversed(self.daemons):  # nodes, controller, munge
            daemon.send_signal(signal.SIGKILL if "slurmd" in daemon.args else signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for _ in range(20):
            if not (left := _processes_with(mark)):
                return self.temporary.cleanup()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        raise RuntimeError(f"processes {left} of the test's jobs do not end")


def _processes_with(mark: bytes) -> list[int]:
    """Live processes that were started with this setting in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not dead and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:  # it ended meanwhile
            continue
    return found


if __name__ == "__main__":  # do its daemons start on this machine?
    with Cluster() as started:
        print(started.run("sinfo").stdout)
