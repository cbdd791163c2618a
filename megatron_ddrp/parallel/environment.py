"""Variables by which launchers tell a process its rank and where the ranks meet."""

from __future__ import annotations

import os

from megatron_ddrp.errors import UserError, shared_error

_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables with rank, number of ranks and rank on the host: those of mpirun, which srun may have started, and srun."""
_STEP_SIZES = {"mpirun": "OMPI_COMM_WORLD_SIZE", "srun": "SLURM_STEP_NUM_TASKS", "mpiexec": "PMI_SIZE"}
"""Launcher → its variable with the number of processes that it started."""

_REMEDY = "export MASTER_ADDR and MASTER_PORT before it (mpirun passes them on by -x)"


def complete_environment() -> None:
    """Set the variables that `deepspeed` and `torchrun` set for torch, also under plain `python` and `srun`.

    Raises:
        UserError: some of the variables are set by hand and others are missing or no numbers, a launcher started
            several processes that cannot meet (each would train alone), or a batch script of several tasks started one
            process without `srun`, which would wait for the others forever.
    """
    if "RANK" in os.environ:
        _check_variables()
        return
    meeting = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    found = [names for names in _PLACES if meeting and {*names} <= os.environ.keys()]
    if not found:
        _refuse_lone_processes()
        _refuse_missing_srun()
    place = [os.environ[name] for name in found[0]] if found else ["0", "1", "0"]
    os.environ.update(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), place, strict=True))


def _check_variables() -> None:
    """Refuse a RANK without the variables that belong to it. With one rank, LOCAL_RANK may be missing."""
    names = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") != "1":
        names += ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        value = os.environ.get(name)
        if value is None:
            raise UserError(f"{name} is not set, but RANK is: let deepspeed or torchrun set both, or set none")
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise UserError(f"{name} is {value!r}, not a number: let deepspeed or torchrun set it")


def _refuse_lone_processes() -> None:
    """Refuse several processes of a launcher that have no place to meet."""
    for launcher, name in _STEP_SIZES.items():
        if (count := os.environ.get(name, "1")) != "1":
            remedy = "use deepspeed or torchrun" if launcher == "mpiexec" else _REMEDY
            raise shared_error(
                f"{launcher} started {count} processes, and each would run alone, as they have no address to meet: "
                f"{remedy} (docs/launching.md)"
            )


def _refuse_missing_srun() -> None:
    """Refuse a batch script of several tasks that is meant to meet but did not use `srun`."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and "MASTER_ADDR" in os.environ:
        raise UserError(
            f"the job has {tasks} tasks, but srun did not start this process, so it would wait for the others: put "
            "srun before the command, or unset MASTER_ADDR for one process alone (docs/launching.md)"
        )
