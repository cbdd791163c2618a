"""Reading minimal pairs, and the published levels that may lie beside them."""

import json

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.minimal_pairs.pairs import published_levels, read_pairs
from tests.unit.tasks.minimal_pairs.conftest import PAIRS, write_pairs

GOOD = '{"sentence_good": "a b", "sentence_bad": "b a"}\n'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no rows, expected at least one"),
        ("{}\n", "line 1: sentence_good is missing"),
        (GOOD + "\n" + '{"sentence_good": "a b"}\n', "line 3: sentence_bad is missing"),
        (GOOD + '{"sentence_good": " ", "sentence_bad": "b"}\n', "line 2: sentence_good is ' '"),
        (GOOD + '{"sentence_good": 3, "sentence_bad": "b"}\n', "line 2: sentence_good is 3"),
        (GOOD + "[1]\n", "line 2: a JSON list, expected one object per line"),
        (GOOD + "{\n", "line 2: not JSON"),
        (GOOD + "[" * 100_000 + "\n", "line 2: not JSON (nested too deeply); expected one object per line"),
        (GOOD + '{"sentence_good": "\xe9", "sentence_bad": "b"}\n', "line 2: not UTF-8"),
        (GOOD[:-2] + ', "UID": 7}\n', "line 1: UID is 7"),
        (
            GOOD + GOOD[:-2] + ', "sentence_bad": "b"}\n',
            "line 2: key 'sentence_bad' is twice in one object; remove one",
        ),
        (GOOD[:-2] + ', "UID": "a", "UID": "b"}\n', "line 1: key 'UID' is twice in one object; remove one"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name_and_line(tmp_path, content, reason):
    (tmp_path / "pairs.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="pairs.jsonl") as error:
        read_pairs(tmp_path)
    assert reason in str(error.value)


def test_a_folder_without_files_and_a_uid_in_two_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no .jsonl file"):
        read_pairs(tmp_path)
    write_pairs(tmp_path / "blimp" / "data", uid="zero")
    with pytest.raises(UserError, match=f"sentence_bad; maybe --data-dir {tmp_path}/blimp/data$"):
        read_pairs(tmp_path)
    write_pairs(tmp_path, uid="one")
    (tmp_path / "two.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    with pytest.raises(UserError, match="two.jsonl: UID 'one' is in .*one.jsonl too"):
        read_pairs(tmp_path)


def test_a_pair_belongs_to_its_uid_else_to_its_file(tmp_path):
    write_pairs(tmp_path / "data", uid="island", field="syntax/semantics", linguistics_term="islands")
    (tmp_path / "data" / "own.jsonl").write_text("\ufeff" + GOOD + "\n" + GOOD)
    island, own = read_pairs(tmp_path)
    assert (island.uid, island.field, island.term, len(island)) == ("island", "syntax_semantics", "islands", len(PAIRS))
    assert (own.uid, own.field, own.places) == ("own", "", [f"{own.file}, line {number}" for number in (1, 3)])
    assert [list(pair) for pair in zip(island.good, island.bad, strict=True)] == [list(pair) for pair in PAIRS]


def test_a_sample_is_the_same_every_time_and_known_by_its_sentences(tmp_path):
    write_pairs(tmp_path)
    (whole,), (first,), (again,) = read_pairs(tmp_path), read_pairs(tmp_path, 3), read_pairs(tmp_path, 3)
    assert len(first) == 3
    assert first == again
    assert [whole.good[whole.places.index(place)] for place in first.places] == first.good
    assert first.digest == again.digest != whole.digest
    assert read_pairs(tmp_path, 99)[0] == whole


def test_published_levels_are_shown_where_they_cover_all_paradigms(tmp_path):
    summary = tmp_path / "raw_results" / "summary"
    summary.mkdir(parents=True)
    row = {"UID": "a", "ngram": 0.1, "lstm": 0.2, "txl": 0.3, "gpt2": 0.4}
    (summary / "models_summary.jsonl").write_text(json.dumps(row) + "\n")
    levels = {"5-gram": {"a": 0.1}, "LSTM": {"a": 0.2}, "Transformer-XL": {"a": 0.3}, "GPT-2": {"a": 0.4}}
    assert published_levels(tmp_path, ["a"]) == levels
    (summary / "human_validation_summary.csv").write_text('"Condition","total_mean"\n"a",0.9\n')
    assert published_levels(tmp_path / "data", ["a"]) == levels | {"human": {"a": 0.9}}
    assert published_levels(tmp_path, ["a", "b"]) == {}
    assert published_levels(tmp_path / "data" / "deeper", ["a"]) == {}
    (summary / "models_summary.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="not BLiMP's summary of models"):
        published_levels(tmp_path, ["a"])
