"""The fast tests and two ranks of the gradient test, with the lowest and with the newest versions that are allowed.

    python -m tests.endurance.floors [--only lowest]

uv makes an environment of each kind with this Python, out of what pyproject.toml allows to the package and its extras
(packages of development are the newest ones in both). A floor that is not in the lowest environment, because another
package or this Python needs more, is named: it was not tried. The last lines are the table of docs/install.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from megatron_ddrp.pages.markdown import Table
from tests.endurance.lines import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
UV = [sys.executable, "-m", "uv"]
OF_DEVELOPMENT = {"dev", "docs"}
TESTS = {
    "fast tests": ["-m", "not slow", "-n", "2", "--dist", "loadfile"],
    "gradients on 2 ranks": ["tests/integration/test_gradients.py", "-k", "changed_gradient"],
}


def requirements() -> dict[str, list[Requirement]]:
    """Return what the package ("") and each extra of users asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: words for name, words in project["optional-dependencies"].items() if name not in OF_DEVELOPMENT}
    return {name: list(map(Requirement, words)) for name, words in ({"": project["dependencies"]} | extras).items()}


def floor_of(requirement: Requirement) -> Version:
    """Return the lowest version that a requirement allows."""
    (floor,) = (specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
    return Version(floor)


def make_environment(kind: str, folder: Path) -> Path:
    """Make an environment with this Python; return its interpreter."""
    python, versions = folder / kind / "bin" / "python", folder / f"{kind}.txt"
    extras = list(filter(None, requirements()))
    subprocess.run([*UV, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder / kind)], check=True)
    flags = ["--quiet", "--python", str(python)]
    asked = [*chain(*(("--extra", extra) for extra in extras)), "--resolution", RESOLUTIONS[kind]]
    subprocess.run([*UV, "pip", "compile", "pyproject.toml", *flags, *asked, "-o", str(versions)], cwd=ROOT, check=True)
    everything = f".[{','.join(['dev', *extras])}]"
    subprocess.run([*UV, "pip", "install", *flags, "-e", everything, "-c", str(versions)], cwd=ROOT, check=True)
    return python


def try_environment(kind: str, python: Path) -> dict[str, str]:
    """Run the tests with an interpreter; return its versions by package, and the result of each group of tests."""
    listing = subprocess.check_output([*UV, "pip", "list", "--quiet", "--format", "json", "--python", str(python)])
    versions = {package["name"].lower(): package["version"] for package in json.loads(listing)}
    ours = {requirement.name: requirement for requirement in chain(*requirements().values())}
    for name, requirement in ours.items():
        if kind == "lowest" and floor_of(requirement) != Version(versions[name]):
            print(f"not tried: {requirement}; this environment has {versions[name]}", flush=True)
    results = {
        name: "pass" if subprocess.run([str(python), "-m", "pytest", *words], cwd=ROOT).returncode == 0 else "FAIL"
        for name, words in TESTS.items()
    }
    return {"Python": sys.version.split()[0]} | {name: versions[name] for name in ours} | results


def main() -> int:
    """Return 0 if all tests passed in all environments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RESOLUTIONS, help="one of the environments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="floors-") as temporary:
        kinds = [arguments.only] if arguments.only else list(RESOLUTIONS)
        columns = [try_environment(kind, make_environment(kind, Path(temporary))) for kind in kinds]
    print(Table(["", *kinds], [[name, *(column[name] for column in columns)] for name in columns[0]]))
    return int(any("FAIL" in column.values() for column in columns))


if __name__ == "__main__":
    sys.exit(main())
