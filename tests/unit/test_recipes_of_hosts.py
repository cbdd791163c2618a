"""Recipes for several machines send environment variables to the other machines."""

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHOW = """#!/usr/bin/env bash
echo "$TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR ${DS_ENV_FILE:-none}"
[[ ! -f ${DS_ENV_FILE:-} ]] || cat "$DS_ENV_FILE"
"""


def launch(name: str, tmp_path: Path, **variables: str) -> list[str]:
    """Run a recipe whose launcher shows what it was given; return its lines."""
    for program in ("deepspeed", "python"):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(SHOW)
        path.chmod(0o755)
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    (home / ".deepspeed_env").write_text("OMP_NUM_THREADS=4\n")
    surroundings = {"PATH": f"{path.parent}:{os.environ['PATH']}", "HOME": str(home), "TMPDIR": str(temporary)}
    words = ["bash", str(EXAMPLES / name)]
    return subprocess.run(
        words, env=surroundings | variables, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("name", ["pretrain_ddrp_base_16gpu.sh", "pretrain_ddrp_3.9b_64gpu.sh"])
def test_caches_on_local_disks_and_the_interface_reach_all_machines(name: str, tmp_path: Path) -> None:
    shown, *sent = launch(name, tmp_path, GLOO_SOCKET_IFNAME="eth1", TRITON_CACHE_DIR="/scratch/triton")
    local = f"/tmp/torchinductor_{os.getuid()}"
    assert shown.startswith(f"/scratch/triton {local} /")
    assert set(sent) == {
        "GLOO_SOCKET_IFNAME=eth1",
        "TRITON_CACHE_DIR=/scratch/triton",
        f"TORCHINDUCTOR_CACHE_DIR={local}",
        "OMP_NUM_THREADS=4",
    }
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_file_of_the_user_stays_and_ranks_of_slurm_write_none(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_text("A=1\n")
    shown = launch("pretrain_ddrp_3.9b_64gpu.sh", tmp_path, DS_ENV_FILE=str(own))
    assert shown[0].endswith(str(own)) and shown[1:] == ["A=1"]
    (tmp_path / "slurm").mkdir()
    [of_rank] = launch("pretrain_ddrp_base_16gpu.sh", tmp_path / "slurm", LAUNCHER="python")
    assert of_rank == f"/tmp/triton_{os.getuid()} /tmp/torchinductor_{os.getuid()} none"
