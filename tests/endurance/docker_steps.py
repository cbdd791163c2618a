"""The steps of the Dockerfile, run in a fresh virtual environment: for machines without docker.

    python -m tests.endurance.docker_steps [--arg TORCH_INDEX= …]

Runs every RUN line with the shell, on a copy of the files that .dockerignore lets through, with the values of ARG.
Lines that need an image's root (`apt-get`, `useradd`) are named and left out. Then the entry point prints its version
and preprocesses a text as a user would, in an empty folder.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

from tests.endurance.lines import ROOT

NEEDS_AN_IMAGE = ("apt-get ", "useradd ")


class Dockerfile(NamedTuple):
    """Instructions of a Dockerfile, in their order."""

    instructions: list[tuple[str, str]]
    """(RUN, command), (COPY, . /src), …"""

    def all_of(self, name: str) -> list[str]:
        """Return the values of an instruction."""
        return [value for instruction, value in self.instructions if instruction == name]

    def defaults(self, name: str) -> dict[str, str]:
        """Return the variables that `ARG` or `ENV` sets."""
        words = [word for value in self.all_of(name) for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)


def read_dockerfile(path: Path = ROOT / "Dockerfile") -> Dockerfile:
    """Return the instructions of a Dockerfile; a line that ends in a backslash goes on in the next."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return Dockerfile([(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines])


def context_files(root: Path = ROOT) -> list[Path]:
    """Return the files that .dockerignore lets through and git does not ignore, relative to `root`."""
    rules = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    listing = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listing, text=True).splitlines()
    return [Path(name) for name in names if Path(name).parts[0] in allowed and (root / name).exists()]


def run_steps(folder: Path, overrides: dict[str, str]) -> None:
    """Run the Dockerfile's steps in `folder`: .venv there is the image's Python."""
    dockerfile, source = read_dockerfile(), folder / "src"
    for file in context_files():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, source / file)
    venv.create(folder / "python", with_pip=True)
    variables = {**dockerfile.defaults("ARG"), **overrides}
    environment = {"PATH": f"{folder / 'python' / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **variables}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for command in dockerfile.all_of("RUN"):
        if command.startswith(NEEDS_AN_IMAGE):
            print(f"left out, needs an image: {command}", flush=True)
            continue
        began = time.monotonic()
        subprocess.run(["sh", "-c", command.replace("/src", str(source))], env=environment, cwd=folder, check=True)
        print(f"{time.monotonic() - began:6.1f} s  {command}", flush=True)
    shutil.rmtree(source)  # from here on the installed package alone
    use_entry_point(folder, json.loads(dockerfile.all_of("ENTRYPOINT")[0]), environment)


def use_entry_point(folder: Path, entry_point: list[str], environment: dict[str, str]) -> None:
    """Print the command's version, train a vocabulary and preprocess a text in an empty folder."""
    work = folder / "data"
    work.mkdir()
    (work / "text.txt").write_text("\n\n".join(f"a line about number {n} and birds" for n in range(50)))
    for words in (
        ["--version"],
        ["train-tokenizer", "--input", "text.txt", "--vocab-size", "100", "--output", "vocab.txt"],
        ["preprocess", "--input", "text.txt", "--output-prefix", "text", "--vocab-file", "vocab.txt"],
    ):
        print("$", *entry_point, *words, flush=True)
        subprocess.run([*entry_point, *words], env=environment, cwd=work, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="as docker's --build-arg")
    overrides = dict(argument.split("=", 1) for argument in parser.parse_args().arg)
    with tempfile.TemporaryDirectory(prefix="docker-steps-") as folder:
        run_steps(Path(folder), overrides)


if __name__ == "__main__":
    sys.exit(main())
