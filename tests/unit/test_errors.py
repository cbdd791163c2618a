"""A mistake is one line and an exit code; a bug keeps its traceback."""

import errno
import pickle

import numpy as np
import pytest
import torch

from megatron_ddrp.errors import UserError, allocations_as_user_errors, refusals_as_user_errors, run_command


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


def test_every_refusal_of_a_file_operation_is_a_line():
    """Also one that nobody foresaw: a rank that ended with a traceback would leave the others waiting."""
    for number, words in ((errno.EEXIST, "File exists"), (errno.EREMOTEIO, "Remote I/O error")):
        with pytest.raises(UserError, match=f"run/x: {words}"), refusals_as_user_errors("run/x"):
            raise OSError(number, words)


def test_success_and_result_become_the_exit_code(capsys):
    assert outcome(lambda: None, capsys) == (0, "")
    assert outcome(lambda: 3, capsys) == (3, "")


@pytest.mark.parametrize("bug", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")])
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
    ],
)
def test_memory_that_cannot_be_had_is_one_line(allocate):
    with pytest.raises(UserError, match="^out of memory: [^[][^\n]+; use a smaller"), allocations_as_user_errors():
        allocate()


def test_other_runtime_errors_stay_bugs():
    with pytest.raises(RuntimeError, match="shapes"), allocations_as_user_errors():
        fail(RuntimeError("shapes differ"))
