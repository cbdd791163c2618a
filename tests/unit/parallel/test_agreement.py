"""Agreement on work that takes longer than a collective call may wait."""

from threading import Event

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel import process_group as agreement


@pytest.fixture
def meetings(monkeypatch):
    """Answers of the other rank, one per collective call; without more of them the other rank is done and content."""
    answers, seen = [], []

    def gather(own):
        seen.append(own)
        other = answers.pop(0) if answers else (True if isinstance(own, bool) else None)
        return [own, other] if isinstance(own, bool) else [own, ("b", other)]

    monkeypatch.setattr(agreement, "gather_objects", gather)
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    monkeypatch.setattr(agreement, "PAUSE", 0.01)
    return answers, seen


def test_ranks_meet_while_this_one_works(meetings):
    _, seen = meetings
    enough = Event()

    def work():
        while len(seen) < 4:
            enough.wait(0.001)
        return "read"

    assert agreement.agree_on_long_work(work) == "read"
    assert seen[:4] == [False] * 4 and seen[-2:] == [True, ("a", None)]


def test_a_rank_that_is_done_meets_those_that_work(meetings):
    answers, seen = meetings
    answers += [False, False, False]
    assert agreement.agree_on_long_work(lambda: 3) == 3
    assert seen == [True, True, True, True, ("a", None)]


def test_errors_of_both_ranks_are_raised_here(meetings):
    answers, _ = meetings

    def refuse():
        raise UserError("damaged", 2)

    with pytest.raises(UserError, match=r"^damaged \(on host a\)$") as caught:
        agreement.agree_on_long_work(refuse)
    assert caught.value.exit_code == 2 and caught.value.agreed
    answers += [True, ("of another rank", 1)]
    with pytest.raises(UserError, match=r"^of another rank \(on host b\)$"):
        agreement.agree_on_long_work(lambda: None)
    with pytest.raises(ZeroDivisionError):
        agreement.agree_on_long_work(lambda: 1 // 0)


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_an_error_of_all_hosts_names_none(monkeypatch, hosts):
    failure = ("no vocabulary", 2)
    monkeypatch.setattr(agreement, "gather_objects", lambda _: [(host, failure) for host in hosts])
    with pytest.raises(UserError, match="^no vocabulary$"):
        agreement.agree(lambda: None)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"--seed": "2", "--notes": "False"}, "--seed is 2 on rank 2 (host b) and 1 on rank 0: start all"),
        ({"--seed": "1"}, "--notes is not given on rank 2 (host b) and False on rank 0: start all"),
        ({"--seed": "1", "--notes": "False", "dataset 2": "x"}, "dataset 2 is x on rank 2 (host b) and not given on"),
    ],
)
def test_ranks_with_other_settings_are_refused_on_every_rank(monkeypatch, theirs, words):
    own = {"--seed": "1", "--notes": "False"}
    monkeypatch.setattr(agreement, "gather_objects", lambda item: [("a", own), item, ("b", theirs)])
    with pytest.raises(UserError) as caught:
        agreement.refuse_differences(own)
    assert str(caught.value).startswith(words) and caught.value.exit_code == 2 and caught.value.agreed
    monkeypatch.setattr(agreement, "gather_objects", lambda item: [("a", own), item, ("b", own)])
    agreement.refuse_differences(own)
