"""Run `pretrain_bert.py` of one source tree, once per command line: the half of `exact_losses` that runs in a tree.

    PYTHONPATH=TREE python run_of_a_tree.py TREE RUNS.json

RUNS.json is a list of `{"name", "ranks", "arguments", "folder"}`. The standard output of a run goes to
`FOLDER.stdout`, its standard error to `FOLDER.stderr`; one JSON line per run says how its ranks ended. This file
imports nothing of the repository by name but what a tree of any age has, so that it can run older trees.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT = 180.0
"""Seconds until a run is given up."""
PRELOADED = ("torch", "torch._dynamo", "deepspeed", "megatron_ddrp.arguments", "megatron_ddrp.train")
"""Modules that take long to import; a rank is a fork of a process that holds them."""


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_main(tree: Path, run: dict[str, Any], rank: int, port: int) -> None:
    """Be one rank of a run: the script itself as `__main__`, with the variables that a launcher would set."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{run['folder']}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    ranks = str(run["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    script = str(tree / "pretrain_bert.py")
    sys.argv = [script, *run["arguments"]]
    runpy.run_path(script, run_name="__main__")


def exit_codes(tree: Path, run: dict[str, Any]) -> list[int | None]:
    """Run on fresh ranks and return their exit codes, None for a rank that had to be killed."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=rank_main, args=(tree, run, rank, port)) for rank in range(run["ranks"])]
    for process in ranks:
        process.start()
    end = time.monotonic() + TIMEOUT
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def main() -> None:
    tree, runs = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    for name in PRELOADED:
        importlib.import_module(name)
    found = Path(str(sys.modules["megatron_ddrp"].__file__)).resolve()
    assert found.is_relative_to(tree), f"{found} is not of {tree}: set PYTHONPATH"
    for run in runs:
        print(json.dumps({"name": run["name"], "exit_codes": exit_codes(tree, run)}), flush=True)


if __name__ == "__main__":
    main()
