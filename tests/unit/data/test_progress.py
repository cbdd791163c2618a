"""Bars of long work: on standard error, with a total, silent for what is short or not to be shown."""

from pathlib import Path

from megatron_ddrp.data.progress import progress, reading_progress, show_phase, track


def test_a_tracked_sequence_is_whole_and_its_bar_knows_the_total(monkeypatch):
    bars = []
    monkeypatch.setattr("megatron_ddrp.data.progress.tqdm", lambda **how: bars.append(how) or _Bar())
    assert list(track("abc", "letter", "spelling")) == ["a", "b", "c"]
    assert (bars[0]["total"], bars[0]["unit"], bars[0]["desc"], bars[0]["leave"]) == (3, "letter", "spelling", False)
    assert _Bar.moved == 3


class _Bar:
    moved = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def update(self):
        _Bar.moved += 1


def test_short_work_and_hidden_bars_say_nothing(capsys, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    with progress("row", 2, show=False) as hidden, reading_progress([tmp_path / "file"]) as reading:
        assert reading.total == 5 and hidden.disable
        reading.update(5)
    assert list(track([1], "item")) == [1]
    assert capsys.readouterr().err == ""


def test_a_full_bar_names_what_goes_on_behind_it_in_a_log_after_ten_seconds_only(capsys):
    with progress("row", 2) as bar, progress("row", 2, show=False) as hidden:
        bar.update(2)
        show_phase(hidden, "sorting")
        show_phase(bar, "sorting")
        assert capsys.readouterr().err == ""
        bar.start_t -= 11
        show_phase(bar, "learning the pieces")
        assert "learning the pieces: 100%" in capsys.readouterr().err
