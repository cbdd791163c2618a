"""A Python that starts in milliseconds: a fork of a process whose imports are done, which enters a host's namespaces.

    python -m tests.cluster.forks

On the hosts `SHIM/python` stands for the environment's Python. It asks this server for a fork with its own variables,
folder and files, passes signals on, and ends as the fork ends.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from tests.cluster.hosts import BIN, SHIM, WORLD, name_of_rank
from tests.integration.launch import PRELOADED

SOCKET = WORLD / "forks.sock"
LAUNCHERS = ("deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.elastic.multiprocessing")
NAMESPACES = ("net", "uts", "ipc", "pid")
SET_NAME = 15
"""Linux's `PR_SET_NAME`."""
LIBC = ctypes.CDLL(None, use_errno=True)

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
while words and words[0] in ("-u", "-B"):
    words = words[1:]
forked = words and (words[:2] == ["-m", "deepspeed.launcher.launch"] or words[0].endswith({programs}))
if not forked or "--dry-run" in words:
    os.execv("{real}", ["{real}", *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect("{socket}")
def forward(number, _):
    try:
        server.sendall(b"%d " % number)
    except OSError:
        pass
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, forward)
pid = int(open("{world}/hosts/" + socket.gethostname() + "/pid").read())
request = json.dumps([pid, words, dict(os.environ), os.getcwd()]).encode() + b"\\n"
socket.send_fds(server, [request[:1]], [0, 1, 2])
server.sendall(request[1:])
answer = b""
while not answer.endswith(b"\\n"):
    got = server.recv(100)
    answer += got or b"1\\n"
code = int(answer)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The shim: a small Python program, which starts in 15 ms."""


def write_shim() -> None:
    """Write the commands that stand for those of the environment."""
    SHIM.mkdir()
    programs = ("pretrain_bert.py", "bin/torchrun", "bin/megatron-ddrp")
    python = os.path.realpath(sys.executable)
    client = CLIENT.format(python=python, programs=programs, real=BIN / "python", socket=SOCKET, world=WORLD)
    scripts = {name: f'exec {SHIM}/python {BIN}/{name} "$@"' for name in ("torchrun", "megatron-ddrp")}
    # DeepSpeed's command itself is real; the Python that it starts on the hosts is the shim.
    runner = f"import sys; sys.executable = '{SHIM}/python'; from deepspeed.launcher.runner import main; main()"
    scripts["deepspeed"] = f'exec {BIN}/python -c "{runner}" "$@"'
    for name, text in {"python": client, **{name: f"#!/bin/sh\n{line}\n" for name, line in scripts.items()}}.items():
        (SHIM / name).write_text(text, encoding="utf-8")
        (SHIM / name).chmod(0o755)


def serve() -> NoReturn:
    """Answer requests until this process is killed."""
    for name in (*LAUNCHERS, *PRELOADED):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(SOCKET))
    listener.listen(100)
    while True:
        client, _ = listener.accept()
        request, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
        while not request.endswith(b"\n"):
            request += client.recv(1 << 20)
        if os.fork() == 0:
            listener.close()
            start(client, json.loads(request), files)
        client.close()
        for number in files:
            os.close(number)


def start(client: socket.socket, request: list[Any], files: list[int]) -> NoReturn:
    """Enter the host's namespaces and run a program there in a child: only a child is in another process namespace."""
    host, words, variables, folder = request
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    mounts = os.open(f"/proc/{host}/ns/mnt", os.O_RDONLY)
    for name in NAMESPACES:
        enter(os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY))
    pid = os.fork()
    if pid:
        for number in files:
            os.close(number)
        wait_and_signal(client, pid)
    enter(mounts)
    os.setsid()
    client.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 256)
    run(words, variables, folder)


def enter(namespace: int) -> None:
    """Enter an open namespace."""
    if LIBC.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def wait_and_signal(client: socket.socket, pid: int) -> NoReturn:
    """Pass signals on to the child, and its exit code back; kill it if the one who asked is gone."""
    ended = os.pidfd_open(pid)
    while True:
        if ended in select.select([client.fileno(), ended], [], [])[0]:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % code)
            os._exit(0)
        numbers = client.recv(100)
        for number in numbers.split() if numbers else (signal.SIGKILL,):
            os.kill(pid, int(number))
        if not numbers:
            os._exit(0)


def run(words: list[str], variables: dict[str, str], folder: str) -> NoReturn:
    """Run a script, or a module after `-m`, as Python would, but end without teardown."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.executable = str(SHIM / "python")
    if words[0].endswith("pretrain_bert.py"):  # not DeepSpeed's launcher of a host, whose words end in the same ones
        saves = [value for flag, value in zip(words, words[1:], strict=False) if flag == "--save"]
        LIBC.prctl(SET_NAME, name_of_rank(saves[-1]).encode(), 0, 0, 0)
    code: Any = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], folder
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(OSError):
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
