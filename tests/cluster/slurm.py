"""A Slurm on hosts of the tier: its daemons, its jobs, and the runs in them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path

from tests.cluster.hosts import SECONDS, WORLD, Host, wait_for
from tests.cluster.runs import COURSE, hold, wait_for_step
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags

RECIPE = "examples/pretrain_ddrp_base_slurm.sh"
GPUS = 16
"""Stand-ins per node: devices that behave like /dev/null."""
STEPS = 24
HELD_AT = 6
"""Step after which each run waits until its fault has come."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
PATIENCE = 4 * SECONDS
"""Seconds for a job to end; Slurm itself waits two minutes before it starts a requeued job."""

CONFIG = """
ClusterName=tier
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout=20
SlurmdParameters=config_overrides
StateSaveLocation=/root/state
SlurmdSpoolDir=/root/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/root/slurmctld.log
SlurmdLogFile=/root/slurmd.log
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=slurm[1-7] CPUs=64 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=slurm[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=slurm[3-4] PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=high Nodes=slurm[3-4] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=spare Nodes=slurm[5-7] MaxTime=INFINITE State=UP
"""
SERVICES = """
mount --bind {world}/etc/slurm /etc/slurm
for n in $(seq 0 {last}); do mknod /run/gpu$n c 1 3; done
cp {world}/etc/munge.key /root/munge.key
chmod 600 /root/munge.key
mkdir -p /root/state /root/spool
munged --force --key-file=/root/munge.key --log-file=/root/munged.log --pid-file=/run/munge/munged.pid \
    --seed-file=/root/munge.seed
{daemon}
"""


class Job:
    """A job and the run in it."""

    def __init__(self, slurm: Slurm, number: str, save: Path) -> None:
        self.slurm, self.number, self.save = slurm, number, save

    def info(self) -> dict[str, str]:
        """Return what `scontrol show job` says about the job."""
        text = self.slurm.control.run(f"scontrol show job {self.number}").stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def explain(self) -> str:
        """Return the job's state and its output, for a failing test."""
        return f"{self.info()}\n{self.text()[-5000:]}\n{self.slurm.control.run('squeue; sinfo').stdout}"

    def text(self) -> str:
        """Return what the job printed in all its starts."""
        with contextlib.suppress(FileNotFoundError):
            return (self.slurm.folder / f"{self.number}.out").read_text(encoding="utf-8", errors="replace")
        return ""

    def wait_until(self, *states: str) -> dict[str, str]:
        """Wait until the job has one of these states, and return `info`."""
        wait_for(lambda: self.info().get("JobState") in states, self.explain, PATIENCE)
        return self.info()

    def wait_until_held(self) -> None:
        """Wait until the run is held."""
        wait_for_step(self.save, HELD_AT, self.explain)

    def last_node(self) -> Host:
        """Return the last node that has a rank of the run."""
        return [host for host in self.slurm.nodes if host.ranks(self.save)][-1]


class Slurm:
    """The cluster: one host with the daemon of the queue, seven nodes."""

    def __init__(self, hosts: dict[str, Host], flags: Flags, corpus: TinyCorpus) -> None:
        self.control = hosts["control"]
        self.nodes = [host for name, host in hosts.items() if name.startswith("slurm")]
        self.folder, self.flags, self.corpus = WORLD / "runs" / "slurm", flags, corpus
        self.folder.mkdir(parents=True)
        etc = WORLD / "etc" / "slurm"
        etc.mkdir()
        (etc / "slurm.conf").write_text(CONFIG.format(gpus=GPUS), encoding="utf-8")
        (etc / "gres.conf").write_text(f"NodeName=slurm[1-7] Name=gpu File=/run/gpu[0-{GPUS - 1}]\n", encoding="utf-8")
        (WORLD / "etc" / "munge.key").write_bytes(os.urandom(128))
        for host in (self.control, *self.nodes):
            daemon = "slurmctld" if host is self.control else "slurmd"
            services = SERVICES.format(world=WORLD, last=GPUS - 1, daemon=daemon)
            (host.folder / "services.sh").write_text(services, encoding="utf-8")
            done = host.run(f"bash -e {host.folder}/services.sh")
            assert done.returncode == 0, done.stderr
        idle = "sinfo -h -o %T:%D -p main,low,spare"
        wait_for(lambda: self.control.run(idle).stdout.split() == ["idle:7"], self.state)

    def state(self) -> str:
        """Return the nodes' states and the queue."""
        return self.control.run("sinfo -R; sinfo; squeue; tail -n 20 /root/slurmctld.log").stdout

    def submit(self, name: str, *options: str, held_at: int = HELD_AT) -> Job:
        """Queue the recipe on two nodes with one rank each; the run is held after a step."""
        save = self.folder / name
        hold(save, held_at)
        words = [*self.words(), "--save", str(save), "--load", str(save)]
        sizes = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "-J", name, "-o", f"{self.folder}/%j.out"]
        return Job(self, self.run(shlex.join(["sbatch", "--parsable", *sizes, *options, RECIPE, *words])).strip(), save)

    def words(self) -> list[str]:
        """Return the flags of a small run, which win over the recipe's."""
        return [*self.flags(**(COURSE | {"train_iters": STEPS})), "--no-fp16"]

    def run(self, command: str, **variables: str) -> str:
        """Run a command on the login host, and return its output; it must end well."""
        done = self.control.run(command, **variables)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout
