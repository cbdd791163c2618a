"""A mistake is one line and an exit code; a bug keeps its traceback."""

import errno
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ddrp.errors import (
    FAILURE,
    WRONG_ARGUMENTS,
    UserError,
    allocations_as_user_errors,
    code_of_others,
    need_packages,
    refusals_as_user_errors,
    run_command,
)
from megatron_ddrp.foreign import reading
from megatron_ddrp.parallel.process_group import lost_rank_in_one_line

ROOT = Path(__file__).parents[2]


def outcome(main, capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(main, "tool")
    return caught.value.code, capsys.readouterr().err


def fail(error):
    raise error


def test_mistakes_are_one_line(capsys):
    assert outcome(lambda: fail(UserError("two\n lines")), capsys) == (1, "tool: error: two lines\n")
    assert outcome(lambda: fail(UserError("wrong", exit_code=2)), capsys) == (2, "tool: error: wrong\n")
    assert outcome(lambda: fail(KeyboardInterrupt()), capsys) == (130, "tool: error: interrupted\n")
    full = OSError(errno.ENOSPC, "No space left on device", "out.bin")
    assert outcome(lambda: fail(full), capsys) == (1, "tool: error: out.bin: No space left on device\n")


@pytest.mark.parametrize("name", ["EEXIST", "ELOOP", "EMFILE", "ENFILE", "EBADF"])
def test_refusals_of_the_system_are_one_line(name, capsys):
    refusal = OSError(getattr(errno, name), "the reason", "f")
    assert outcome(lambda: fail(refusal), capsys) == (1, "tool: error: f: the reason\n")


def test_a_circle_of_links_is_one_line(capsys):
    line = "tool: error: Symlink loop from 'a'; remove the link, or give another path\n"
    assert outcome(lambda: fail(RuntimeError("Symlink loop from 'a'")), capsys) == (1, line)


def test_every_refusal_of_a_file_operation_is_a_line():
    """Also one that nobody foresaw: a rank that ended with a traceback would leave the others waiting."""
    for number, words in ((errno.EEXIST, "File exists"), (errno.EREMOTEIO, "Remote I/O error")):
        with pytest.raises(UserError, match=f"run/x: {words}"), refusals_as_user_errors("run/x"):
            raise OSError(number, words)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("mine"),
        RuntimeError("cannot allocate mine"),
        RuntimeError("NCCL of mine"),
        RuntimeError("Symlink loop of mine"),
        BrokenPipeError("mine"),
        OSError(errno.ENOSPC, "mine"),
        ValueError("mine"),
    ],
    ids=str,
)
def test_errors_of_others_stay_as_they_are(error):
    @code_of_others()
    def theirs():
        raise error

    def ours():
        with (
            lost_rank_in_one_line(),
            allocations_as_user_errors(),
            refusals_as_user_errors("run"),
            reading("file"),
        ):
            theirs()

    with pytest.raises(type(error)) as raised:
        run_command(ours, "tool")
    assert raised.value is error


def test_a_mistake_of_others_is_one_line_and_of_one_rank(capsys):
    error = UserError("theirs", WRONG_ARGUMENTS)
    assert error.agreed
    assert outcome(code_of_others()(lambda: fail(error)), capsys) == (2, "tool: error: theirs\n")
    assert not error.agreed


def test_success_and_result_become_the_exit_code(capsys):
    assert outcome(lambda: None, capsys) == (0, "")
    assert outcome(lambda: 3, capsys) == (3, "")


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError(), OSError(errno.EINVAL, "Invalid argument"), RuntimeError("Symlinks")]
)
def test_bugs_keep_their_traceback(bug):
    with pytest.raises(type(bug)):
        run_command(lambda: fail(bug), "tool")


def test_the_exit_code_crosses_processes():
    assert pickle.loads(pickle.dumps(UserError("x", exit_code=2))).exit_code == 2


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**56),
        lambda: torch.empty(2**62, 2**62, device="meta"),
        lambda: np.empty(2**50),
        lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda: fail(RuntimeError("unable to mmap 8 bytes from file </dev/shm/x>: Cannot allocate memory (12)")),
    ],
)
def test_memory_that_cannot_be_had_is_one_line(allocate):
    with pytest.raises(UserError, match="^out of memory: [^[][^\n]+; use a smaller"), allocations_as_user_errors():
        allocate()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.73 GiB of which 1.20 "
                "GiB is free. Including non-PyTorch memory, this process has 30.51 GiB memory in use. Of the allocated "
                "memory 29.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
            ),
            "Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.73 GiB of which 1.20 GiB is free. Including "
            "non-PyTorch memory, this process has 30.51 GiB memory in use",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4,294,967,296 bytes",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "CUDA error: out of memory",
        ),
        (MemoryError(), "the system has no more"),
    ],
)
def test_a_lack_of_memory_says_what_was_asked_for_and_what_to_lower(error, line):
    with pytest.raises(UserError) as raised, allocations_as_user_errors(lambda: "use less"):
        fail(error)
    assert str(raised.value) == f"out of memory: {line or error}; use less"


def test_every_command_answers_a_lack_of_memory_in_one_line(capsys):
    code, line = outcome(lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), capsys)
    assert code == 1 and line.startswith("tool: error: out of memory: Tried to allocate 2 GiB; use a smaller")


def test_other_runtime_errors_stay_bugs():
    with pytest.raises(RuntimeError, match="shapes"), allocations_as_user_errors():
        fail(RuntimeError("shapes differ"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "markdown", None)
    need_packages("the page", "json")
    with pytest.raises(
        UserError, match=r"^the page needs matplotlib, not installed here: pip install matplotlib$"
    ) as one:
        need_packages("the page", "json", "matplotlib")
    assert one.value.exit_code == FAILURE
    with pytest.raises(UserError, match=r"needs markdown and matplotlib.*: pip install markdown matplotlib$") as both:
        need_packages("the page", "markdown", "matplotlib", exit_code=WRONG_ARGUMENTS)
    assert both.value.exit_code == WRONG_ARGUMENTS


def test_no_message_asks_for_a_release_of_this_package():
    """A clone is installed, not a release: a message names the package that is missing."""
    texts = {path: path.read_text() for path in (ROOT / "megatron_ddrp").rglob("*.py")}
    assert len(texts) > 100 and not [str(path) for path, text in texts.items() if "megatron-ddrp[" in text]
