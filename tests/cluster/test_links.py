"""Faults of hosts and of the network between them; ranks without a launcher, forked onto the hosts."""

import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.hosts import missing
from tests.cluster.runs import (
    Pair,
    Seen,
    assert_equal,
    end,
    exit_code,
    hold,
    let_go,
    start,
    start_held,
    texts,
    wait_for_step,
    words_of,
)
from tests.integration.conftest import Flags

TIMEOUT = 0.5
"""Minutes after which ranks give up on a silent one."""
OUTAGE = 5.0
"""Seconds of an outage that a run survives."""
STEPS_BETWEEN = 5
"""Steps from one fault of the chain to the next."""


def test_eight_faults_in_one_run(pair: Pair, flags: Flags, whole: Path, folder: Path, seen: Seen) -> None:
    """Each start resumes what the last fault left; the last one has the hosts in the other order."""
    first, second = pair
    save = folder / "chain"
    words = words_of(flags, save, distributed_timeout_minutes=TIMEOUT)
    lost, stopped = "1 in one line; the same command resumes", "75 on both, saved; the same command resumes"
    late = "1 in one line, after the timeout; the same command resumes"
    faults: list[tuple[str, Callable[[], None], list[int | None], str]] = [
        ("SIGKILL of rank 1", partial(second.signal_rank, signal.SIGKILL, save), [1, -9], lost),
        ("SIGKILL of rank 0", partial(first.signal_rank, signal.SIGKILL, save), [-9, 1], lost),
        ("link of host 2 down for good", partial(second.link, "down"), [1, 1], late),
        ("SIGSTOP of rank 1", partial(second.signal_rank, signal.SIGSTOP, save), [1, None], late),
        ("power cut of host 2", second.power_off, [1, -9], late),
        ("power cut of host 1 (rank 0)", first.power_off, [-9, 1], late),
        ("SIGUSR1 to rank 1", partial(second.signal_rank, signal.SIGUSR1, save), [75, 75], stopped),
        ("SIGTERM to rank 1", partial(second.signal_rank, signal.SIGTERM, save), [75, 75], stopped),
    ]
    for number, (name, harm, codes, _) in enumerate(faults, 1):
        step = STEPS_BETWEEN * number
        ranks = start_held(save, step, pair, words, folder)
        harm()
        hold(save, step + STEPS_BETWEEN - 1)
        end([rank for rank, code in zip(ranks, codes, strict=True) if code is not None])
        assert [rank.process.poll() for rank in ranks] == codes, f"{name}\n{texts(ranks)}"
        for rank, code in zip(ranks, codes, strict=True):
            assert rank.text().count("lost another rank: ") == (code == 1), f"{name}\n{texts(ranks)}"
            assert "Traceback" not in rank.text()
        assert exit_code(save) == ("75" if codes == [75, 75] else "")
        for host in pair:
            if not host.pid:
                host.power_on()
            host.link("up")
        if None in codes:
            second.signal_rank(signal.SIGKILL, save)
            end(ranks)
    let_go(save)
    ranks = start((second, first), words, folder)
    assert end(ranks) == [0, 0], texts(ranks)
    assert_equal(save, whole)
    for name, _, _, came in faults:
        seen("ranks", name, came)
    seen("ranks", "all of these in one run, then the hosts swapped, to its end", "0, bit for bit")


def test_a_run_survives_an_outage_a_slow_network_and_a_pause(
    pair: Pair, flags: Flags, whole: Path, folder: Path, seen: Seen
) -> None:
    """One run goes through all three. Seconds pass, since an outage has a length."""
    if reason := missing("tc", "iptables"):
        pytest.skip(reason)
    second, save = pair[1], folder / "soft"

    def inside(command: str) -> None:
        subprocess.run(["ip", "netns", "exec", second.name, *command.split()], check=True)

    ranks = start_held(save, 5, pair, words_of(flags, save), folder)
    second.link("down")
    hold(save, 15)
    time.sleep(OUTAGE)
    second.link("up")
    wait_for_step(save, 15, lambda: texts(ranks))
    inside("tc qdisc add dev eth0 root tbf rate 8mbit burst 32kb latency 400ms")
    inside("iptables -A INPUT -m statistic --mode random --probability 0.01 -j DROP")
    hold(save, 25)
    wait_for_step(save, 25, lambda: texts(ranks))
    inside("tc qdisc del dev eth0 root")
    inside("iptables -F INPUT")
    second.signal_rank(signal.SIGSTOP, save)
    let_go(save)
    time.sleep(OUTAGE)
    second.signal_rank(signal.SIGCONT, save)
    assert end(ranks) == [0, 0], texts(ranks)
    assert_equal(save, whole)
    troubles = f"link down for {OUTAGE:.0f} s; 8 Mbit/s with 1 % loss; a rank stopped for {OUTAGE:.0f} s"
    seen("ranks", troubles, "goes on, bit for bit")


def test_one_host_goes_on_alone(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    """A host is lost for good; the other one resumes alone, with the same global batch."""
    save = folder / "fewer"
    words = words_of(flags, save, 12)
    ranks = start_held(save, 6, pair, words, folder)
    for host in pair:
        host.signal_rank(signal.SIGKILL, save)
    end(ranks)
    let_go(save)
    alone = start(pair[:1], words, folder)
    assert end(alone) == [0], texts(alone)
    assert "checkpoint of 2 ranks" in alone[0].text()
    seen("ranks", "host 2 lost for good, resumed on host 1 alone", "0; one line names the change of layout")
