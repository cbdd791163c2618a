"""Hosts that differ or do not meet: each is refused, or said, in one line that names the host."""

import contextlib
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.runs import Launched, Pair, Seen, assert_equal, end, let_go, start, start_held, texts, words_of
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags
from tests.integration.launch import ROOT, SCRIPT

SHORT = 0.2
"""Minutes of `--distributed-timeout-minutes` where ranks cannot meet."""
OTHER_VERSION = f"""
import runpy, sys, torch
torch.__version__ = "2.6.0"
sys.argv[0] = "{SCRIPT}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def refusal(ranks: Sequence[Launched], codes: Sequence[int], *words: str) -> None:
    """Check that ranks end with these codes, and that one line in all has all these words."""
    assert end(ranks) == list(codes), texts(ranks)
    printed = "".join(rank.text() for rank in ranks)
    lines = [line for line in printed.splitlines() if ": error: " in line and all(word in line for word in words)]
    assert len(lines) == 1, printed
    assert "Traceback" not in printed and "frame #" not in printed


def test_other_code_on_one_host(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    file = ROOT / "megatron_ddrp" / "model" / "__init__.py"
    other = folder / "other.py"
    other.write_text(file.read_text(encoding="utf-8") + "\n# as in another release\n", encoding="utf-8")
    with pair[1].mounted(other, file):
        refusal(start(pair, words_of(flags, folder / "run"), folder), (2, 2), "the code of megatron_ddrp", "host node2")
    seen("ranks", "host 2 has other code of the project", "2, one line names host 2")


def test_another_version_of_torch_on_one_host(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    script, words = folder / "other_version.py", words_of(flags, folder / "run", 2)
    script.write_text(OTHER_VERSION, encoding="utf-8")
    ranks = start(pair, words, folder, last=(script, *words))
    assert end(ranks) == [0, 0], texts(ranks)
    assert len(re.findall("host node2 has .* torch 2.6.0, .*; rank 0 has ", ranks[0].text())) == 1, texts(ranks)
    seen("ranks", "host 2 has another version of torch", "0; one line says so")


def test_other_settings_on_one_host(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    words = words_of(flags, folder / "run")
    ranks = start(pair, words, folder, last=(SCRIPT, *words, "--lr", "2e-3"))
    refusal(ranks, (2, 2), "--lr is 0.002 on rank 1 (host node2)")
    seen("ranks", "host 2 has another --lr", "2, one line names host 2")


def test_no_data_on_one_host(pair: Pair, flags: Flags, tiny_corpus: TinyCorpus, folder: Path, seen: Seen) -> None:
    nothing = folder / "nothing"
    nothing.mkdir()
    with pair[1].mounted(nothing, tiny_corpus.prefix.parent):
        refusal(start(pair, words_of(flags, folder / "run"), folder), (1, 1), "No such file", "(on host node2)")
    seen("ranks", "host 2 lacks the data", "1, one line names host 2")


def test_other_data_on_one_host(pair: Pair, flags: Flags, tiny_corpus: TinyCorpus, folder: Path, seen: Seen) -> None:
    file = Path(f"{tiny_corpus.prefix}.bin")
    tokens = bytearray(file.read_bytes())
    tokens[:200] = tokens[400:600]
    (folder / "other.bin").write_bytes(tokens)
    with pair[1].mounted(folder / "other.bin", file):
        refusal(start(pair, words_of(flags, folder / "run"), folder), (2, 2), "rank 1 (host node2)")
    seen("ranks", "200 bytes of host 2's data differ", "2, one line names host 2")


def test_a_save_folder_that_can_only_be_read(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    save = folder / "run"
    save.mkdir()
    with pair[0].mounted(save, save, "ro"):
        refusal(start(pair, words_of(flags, save), folder), (1, 1), str(save), "Read-only file system")
    seen("ranks", "--save is read-only on host 1", "1, one line before the first step")


def test_a_save_folder_of_each_host_is_not_shared(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    """Two runs at once, one under `--load`: each waits a minute for what NFS may hide so long."""
    runs = {name: folder / name for name in ("fresh", "resumes")}
    with contextlib.ExitStack() as stack:
        for name, save in runs.items():
            for made in (save, folder / f"{name}-own"):
                made.mkdir()
            stack.enter_context(pair[1].mounted(folder / f"{name}-own", save))
        fresh = start(pair, words_of(flags, runs["fresh"], 2, load=None), folder)
        refusal(start(pair, words_of(flags, runs["resumes"]), folder), (1, 1), "is not shared: host node2")
        assert end(fresh) == [0, 0], texts(fresh)
        assert fresh[0].text().count("is not shared: host node2") == 1, texts(fresh)
    seen("ranks", "host 2 does not share --save; the same under --load", "0, one line names host 2; 1, one line")


def test_a_second_run_in_the_same_folder(pair: Pair, flags: Flags, whole: Path, folder: Path, seen: Seen) -> None:
    """The second one comes from the other hosts' order; the first one does not notice."""
    save = folder / "run"
    words = words_of(flags, save)
    ranks = start_held(save, 5, pair, words, folder)
    refusal(start(pair[::-1], words, folder), (1, 1), "is being written by another run", "host node1")
    let_go(save)
    assert end(ranks) == [0, 0], texts(ranks)
    assert_equal(save, whole)
    seen("ranks", "a second run in the same --save", "1, one line names the host of the first; the first: bit for bit")


def cannot_meet(ranks: Sequence[Launched], *patterns: str) -> None:
    """Check that every rank fails without C++ frames; the output has these patterns, and blames no port without one."""
    assert all(code for code in end(ranks)), texts(ranks)
    printed = "".join(rank.text() for rank in ranks)
    assert "frame #" not in printed and "Traceback" not in printed, printed
    assert all(re.search(pattern, printed) for pattern in patterns), printed
    assert ("free --master_port" in printed) == any("free --master_port" in pattern for pattern in patterns), printed


def test_an_address_that_is_not_known(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    words = words_of(flags, folder / "run", distributed_timeout_minutes=SHORT)
    cannot_meet(start(pair, words, folder, MASTER_ADDR="node77"), "cannot meet .*node77", "name")
    seen("ranks", "MASTER_ADDR is a name that is not known", "1 on each, one line, within the timeout")


def test_the_address_of_another_host(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    words = words_of(flags, folder / "run", distributed_timeout_minutes=SHORT)
    cannot_meet(start(pair, words, folder, MASTER_ADDR=pair[1].name), "rank [01].*(node1|node2)")
    seen("ranks", "MASTER_ADDR is host 2, rank 0 on host 1", "1 on each, one line, within the timeout")


def test_a_port_that_is_taken(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    save = folder / "run"
    ranks = start(pair, words_of(flags, save), folder, MASTER_PORT="22")  # sshd's
    cannot_meet(ranks[:1], "Address already in use; give a free --master_port")
    pair[1].signal_rank(signal.SIGKILL, save)
    end(ranks)
    seen("ranks", "the port is taken", "1; give a free --master_port")


def test_a_network_that_does_not_join_the_hosts(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    words = words_of(flags, folder / "run", distributed_timeout_minutes=SHORT)
    cannot_meet(start(pair, words, folder, GLOO_SOCKET_IFNAME="lo"), "GLOO_SOCKET_IFNAME")
    seen("ranks", "gloo takes an interface that does not join the hosts", "1 on each, names GLOO_SOCKET_IFNAME")
