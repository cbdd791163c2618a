"""The lock file, the Dockerfile, the workflow and pre-commit agree with the Makefile and pyproject.toml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.endurance.docker_steps import ROOT, context_files, read_dockerfile
from tests.endurance.floors import floor_of, requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
LOCK = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def required() -> list[Requirement]:
    """Return the packages that pyproject.toml asks for; torch and triton are chosen by the user's build."""
    project = tomllib.loads(PROJECT)["project"]
    words = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    own = ("torch", "triton", project["name"])
    return [requirement for requirement in map(Requirement, words) if requirement.name not in own]


def test_the_lock_holds_a_fitting_version_of_every_requirement() -> None:
    locked = [Requirement(line) for line in LOCK.splitlines() if not line.startswith("#")]
    names = {requirement.name.lower() for requirement in required()}
    assert {"deepspeed", "transformers", "ruff", "types-pyyaml", "mkdocs-material"} <= names
    for requirement in required():
        versions = [str(lock.specifier)[2:] for lock in locked if lock.name == requirement.name.lower()]
        assert versions and all(map(requirement.specifier.contains, versions)), requirement


def test_the_page_has_the_floors_as_versions_that_were_run() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9]+) \| ([0-9.]+) \| [0-9.]+ \|$", page, re.MULTILINE)
    floors = {requirement.name: floor_of(requirement) for requirement in chain(*requirements().values())}
    assert {name: Version(lowest) for name, lowest in rows} == floors, "make floors prints the table"


def test_the_lock_names_no_host_and_no_build_of_torch() -> None:
    assert not re.search(r"://|^--|^-|^(torch|triton|nvidia-\S+)==", LOCK, re.MULTILINE)
    assert f"installs {makefile_value('TORCH')} " in LOCK.splitlines()[0]


def makefile_value(name: str) -> str:
    """Return the default of a variable of the Makefile."""
    return re.findall(rf"^{name} +\?= *(.*)$", MAKEFILE, re.MULTILINE)[0]


def test_the_image_copies_what_its_package_needs() -> None:
    files = {str(file) for file in context_files()}
    assert {"pyproject.toml", "README.md", "requirements-lock.txt", "megatron_ddrp/errors.py"} <= files
    assert not any(file.startswith(("tests/", "docs/", ".git")) for file in files)


@pytest.mark.parametrize("index", ["", "https://host/cpu"])
def test_the_images_steps_install_torch_first_from_the_given_index(index: str, tmp_path: Path) -> None:
    """Every RUN line runs in a shell that knows stand-ins alone, which note their words."""
    dockerfile = read_dockerfile()
    for name in ("pip", "apt-get", "useradd", "chmod", "rm"):
        (tmp_path / name).write_text(f'#!/bin/sh\nIFS="|"\necho "{name}|$*"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**dockerfile.defaults("ARG"), "TORCH_INDEX": index, "TORCH": "torch==9", "PATH": str(tmp_path)}
    command = "\n".join(dockerfile.all_of("RUN"))
    done = subprocess.run(["/bin/sh", "-euc", command], env=environment, capture_output=True, text=True, check=True)
    torch, package = (line.split("|") for line in done.stdout.splitlines() if line.startswith("pip|"))
    assert torch[:4] == ["pip", "install", "--no-cache-dir", "torch==9"]
    assert torch[4:] == (["--extra-index-url", index] if index else [])
    extras = re.fullmatch(r"/src\[(.*)\]", package[-1])
    assert extras and all(re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE) for extra in extras[1].split(","))
    assert package[2:5] == ["--no-cache-dir", "--constraint", "/src/requirements-lock.txt"]


def test_the_image_runs_the_command_and_not_as_root() -> None:
    dockerfile = read_dockerfile()
    names = [name for name, _ in dockerfile.instructions]
    assert dockerfile.defaults("ARG")["TORCH"] == makefile_value("TORCH")
    assert dockerfile.all_of("USER") == ["megatron"] and names.index("USER") > max(
        place for place, name in enumerate(names) if name == "RUN"
    )
    assert json.loads(dockerfile.all_of("ENTRYPOINT")[0]) == ["megatron-ddrp"]


def test_integration_runs_every_test_once_and_the_workflow_runs_integration() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"\bmake .*", script.split("set -euo pipefail")[1]) == ["make lint docs", "make test"]
    assert "\n\t$(PYTEST) $(TESTS)\n" in MAKEFILE and "\ncheck: lint docs " in MAKEFILE
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    tests = workflow["jobs"]["tests"]
    assert {"run": ".ci/run"} in tests["steps"]
    assert tests["env"]["TORCH"].split()[0] == makefile_value("TORCH")


def test_every_hook_before_a_commit_is_a_step_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    lint = MAKEFILE.split("\nlint:")[1].split("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].replace(".venv/bin", "$(BIN)") in lint
