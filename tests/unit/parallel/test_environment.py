"""The variables that launchers set: complete, or refused before a process trains alone."""

from __future__ import annotations

import os

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.rendezvous import complete_environment

ALL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
STARTED_BY_SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
"""What mpirun's own daemon on the second node passes on."""
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.fixture
def given(monkeypatch):
    """Complete an environment that has only these variables; returns rank, number of ranks and local rank."""

    def complete(variables):
        monkeypatch.setattr(os, "environ", dict(variables))
        complete_environment()
        return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))

    return complete


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "1", "0")),
        (ALL, ("1", "2", "1")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("0", "1", None)),
        (SRUN | MEETING, ("3", "4", "1")),
        (BATCH, ("0", "1", "0")),  # the batch script itself, without srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1"}, ("0", "1", "0")),  # and without --ntasks
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("0", "1", "0")),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, ("0", "1", "0")),
        (MPIRUN | MEETING, ("3", "4", "1")),
        (STARTED_BY_SRUN | MPIRUN | MEETING, ("3", "4", "1")),
    ],
)
def test_a_complete_environment(given, variables, expected):
    assert given(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN, "srun started 4 processes, and each would run alone.* export MASTER_ADDR and MASTER_PORT"),
        (SRUN | {"MASTER_ADDR": "node1"}, "srun started 4 processes, .* export MASTER_ADDR and MASTER_PORT"),
        (SRUN | {"MASTER_PORT": "29500"}, "srun started 4 processes, .* export MASTER_ADDR and MASTER_PORT"),
        (BATCH | {"MASTER_ADDR": "node1"}, "the job has 4 tasks, but srun did not start this process"),
        (
            MPIRUN,
            "mpirun started 4 processes.* export MASTER_ADDR and MASTER_PORT before it .mpirun passes them on by -x",
        ),
        ({"PMI_SIZE": "2"}, "mpiexec started 2 processes"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK is"),
        *((({k: v for k, v in ALL.items() if k != name}), f"{name} is not set") for name in list(ALL)[1:]),
        (ALL | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
        (ALL | {"RANK": "-1"}, "RANK is '-1', not a number"),
    ],
)
def test_processes_that_cannot_meet_are_refused(given, variables, message):
    with pytest.raises(UserError, match=message):
        given(variables)
