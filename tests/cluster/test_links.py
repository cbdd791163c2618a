"""Faults of hosts and of the network between them; ranks without a launcher, forked onto the hosts."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, missing
from tests.cluster.runs import (
    Flags,
    Rank,
    assert_equal,
    end,
    exit_code,
    hold,
    let_go,
    start,
    texts,
    wait_for_step,
    words_of,
)

TIMEOUT = 0.5
"""Minutes after which ranks give up on a silent one."""
OUTAGE = 5.0
"""Seconds of an outage that a run survives."""
STEPS_BETWEEN = 5
"""Steps from one fault of the chain to the next."""

Pair = tuple[Host, Host]
Seen = Callable[[str, str, str], None]


def test_eight_faults_in_one_run(pair: Pair, flags: Flags, whole: Path, folder: Path, seen: Seen) -> None:
    """Each start resumes what the last fault left; the last one has the hosts in the other order."""
    first, second = pair
    save = folder / "chain"
    words = words_of(flags, save, distributed_timeout_minutes=TIMEOUT)
    lost, stopped = "1 in one line; the same command resumes", "75 on both, saved; the same command resumes"
    late = "1 in one line, after the timeout; the same command resumes"

    def cut_link(_: list[Rank]) -> None:
        second.link("down")

    faults: list[tuple[str, Callable[[list[Rank]], None], list[int | None], str]] = [
        ("SIGKILL of rank 1", lambda ranks: ranks[1].signal(signal.SIGKILL), [1, -9], lost),
        ("SIGKILL of rank 0", lambda ranks: ranks[0].signal(signal.SIGKILL), [-9, 1], lost),
        ("link of host 2 down for good", cut_link, [1, 1], late),
        ("SIGSTOP of rank 1", lambda ranks: ranks[1].signal(signal.SIGSTOP), [1, None], late),
        ("power cut of host 2", lambda _: second.power_off(), [1, -9], late),
        ("power cut of host 1 (rank 0)", lambda _: first.power_off(), [-9, 1], late),
        ("SIGUSR1 to rank 1", lambda ranks: ranks[1].signal(signal.SIGUSR1), [75, 75], stopped),
        ("SIGTERM to rank 1", lambda ranks: ranks[1].signal(signal.SIGTERM), [75, 75], stopped),
    ]
    for number, (name, harm, codes, _) in enumerate(faults, 1):
        step = STEPS_BETWEEN * number
        hold(save, step)
        ranks = start(pair, words, folder)
        wait_for_step(save, step, lambda ranks=ranks: texts(ranks))
        harm(ranks)
        hold(save, step + STEPS_BETWEEN - 1)
        end([rank for rank, code in zip(ranks, codes, strict=True) if code is not None])
        assert [rank.code() for rank in ranks] == codes, f"{name}\n{texts(ranks)}"
        for rank, code in zip(ranks, codes, strict=True):
            assert rank.text().count("lost another rank: ") == (code == 1), f"{name}\n{texts(ranks)}"
            assert "Traceback" not in rank.text()
        assert exit_code(save) == ("75" if codes == [75, 75] else "")
        for host in pair:
            if not host.pid:
                host.power_on()
            host.link("up")
        if None in codes:
            ranks[codes.index(None)].signal(signal.SIGKILL)
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

    def reach(step: int) -> None:
        wait_for_step(save, step, lambda: texts(ranks))

    def inside(command: str) -> None:
        subprocess.run(["ip", "netns", "exec", second.name, *command.split()], check=True)

    hold(save, 5)
    ranks = start(pair, words_of(flags, save), folder)
    reach(5)
    second.link("down")
    hold(save, 15)
    time.sleep(OUTAGE)
    second.link("up")
    reach(15)
    inside("tc qdisc add dev eth0 root tbf rate 8mbit burst 32kb latency 400ms")
    inside("iptables -A INPUT -m statistic --mode random --probability 0.01 -j DROP")
    hold(save, 25)
    reach(25)
    inside("tc qdisc del dev eth0 root")
    inside("iptables -F INPUT")
    ranks[1].signal(signal.SIGSTOP)
    let_go(save)
    time.sleep(OUTAGE)
    ranks[1].signal(signal.SIGCONT)
    assert end(ranks) == [0, 0], texts(ranks)
    assert_equal(save, whole)
    troubles = f"link down for {OUTAGE:.0f} s; 8 Mbit/s with 1 % loss; a rank stopped for {OUTAGE:.0f} s"
    seen("ranks", troubles, "goes on, bit for bit")


def test_one_host_goes_on_alone(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    """A host is lost for good; the other one resumes alone, with the same global batch."""
    save = folder / "fewer"
    words = words_of(flags, save, 12)
    hold(save, 6)
    ranks = start(pair, words, folder)
    wait_for_step(save, 6, lambda: texts(ranks))
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    end(ranks)
    let_go(save)
    alone = start(pair[:1], words, folder)
    assert end(alone) == [0], texts(alone)
    assert "checkpoint of 2 ranks" in alone[0].text()
    seen("ranks", "host 2 lost for good, resumed on host 1 alone", "0; one line names the change of layout")
