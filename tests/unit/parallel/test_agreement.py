"""Agreement on work that takes longer than a collective call may wait."""

from threading import Event

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel import process_group


@pytest.fixture
def meetings(monkeypatch):
    """Answers of the other rank, one per collective call; without more of them the other rank is done and content."""
    answers, seen = [], []

    def gather(own):
        seen.append(own)
        other = answers.pop(0) if answers else (True if isinstance(own, bool) else None)
        return [own, other]

    monkeypatch.setattr(process_group, "gather_objects", gather)
    monkeypatch.setattr(process_group, "PAUSE", 0.01)
    return answers, seen


def test_ranks_meet_while_this_one_works(meetings):
    _, seen = meetings
    enough = Event()

    def work():
        while len(seen) < 4:
            enough.wait(0.001)
        return "read"

    assert process_group.agree_on_long_work(work) == "read"
    assert seen[:4] == [False] * 4 and seen[-2:] == [True, None]


def test_a_rank_that_is_done_meets_those_that_work(meetings):
    answers, seen = meetings
    answers += [False, False, False]
    assert process_group.agree_on_long_work(lambda: 3) == 3
    assert seen == [True, True, True, True, None]


def test_errors_of_both_ranks_are_raised_here(meetings):
    answers, _ = meetings

    def refuse():
        raise UserError("damaged", 2)

    with pytest.raises(UserError, match="^damaged$") as caught:
        process_group.agree_on_long_work(refuse)
    assert caught.value.exit_code == 2 and caught.value.agreed
    answers += [True, ("of another rank", 1)]
    with pytest.raises(UserError, match="^of another rank$"):
        process_group.agree_on_long_work(lambda: None)
    with pytest.raises(ZeroDivisionError):
        process_group.agree_on_long_work(lambda: 1 // 0)
