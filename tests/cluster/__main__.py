"""The cluster tier: real ssh, pdsh and Slurm on hosts made of namespaces. `make cluster` runs it.

    python -m tests.cluster [--write] [options of pytest]

Everything runs in a world of its own: network, processes and mounts that end with its first process, however that ends.
No interface leads outside, and DeepSpeed's `pkill` reaches nothing else on this machine.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import ROOT, WORLD, missing

ENTER = f"""
mount -t tmpfs tmpfs {WORLD} && mount -t tmpfs tmpfs /run && mkdir /run/lock && ip link set lo up || exit 1
touch {WORLD}/inside
"$@"
exit $?
"""
"""Commands of the world's first process, which gets the command line of pytest."""


def main() -> int:
    namespaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    enter = ["unshare", *namespaces, "--propagation", "private"]
    reason = missing("ip", "unshare", "nsenter", "sshd", "ssh-keygen")
    if not reason:
        tried = subprocess.run([*enter, "true"], capture_output=True, text=True)
        reason = tried.returncode and f"this machine makes no namespaces: {tried.stderr.strip()}"
    if reason:
        print(f"cluster: skipped: {reason}")
        return 0
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "cluster", "-rs"]
    pytest += ["--basetemp", str(WORLD / "pytest"), "--durations=12", str(Path(__file__).parent), *sys.argv[1:]]
    os.chdir(ROOT)
    os.execvp(enter[0], [*enter, "bash", "-c", ENTER, "world", *pytest])


if __name__ == "__main__":
    sys.exit(main())
