"""Settings from YAML: typed by the dataclass that takes them, and refused with the file and the key."""

from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from megatron_ddrp.config.reading import Place, load_values, option, read_section, refuse
from megatron_ddrp.errors import UserError


@dataclass(frozen=True)
class Inner:
    low: float = option(0.0, "…", within="[0, 1)")
    high: float = option(0.5, "…", within="[0, 1)")

    def __post_init__(self) -> None:
        if self.low > self.high:
            refuse(f"low {self.low} is above high {self.high}")


@dataclass(frozen=True)
class Outer:
    name: str = option(MISSING, "…")
    num_items: int = option(1, "…", within="[1, 10]")
    colours: tuple[str, ...] = option((), "…", choices=("red", "green"), distinct=True)
    sizes: int | tuple[int, ...] | None = option(None, "…")
    is_on: bool = option(False, "…")
    inner: Inner = option(Inner(), "…")
    others: tuple[Inner, ...] = option((), "…")
    file: Path = option(Path("x"), "…")


def read(**values):
    return read_section(Outer, values, Place("f.yaml"))


def test_values_take_the_type_of_their_option():
    found = read(name=7, colours="red", sizes=[1, 2], inner={"low": "1e-1"}, others=[{"high": 0.25}, {}], is_on=True)
    assert found == Outer("7", 1, ("red",), (1, 2), True, Inner(0.1), (Inner(high=0.25), Inner()))
    assert read(name="a", sizes=3.0).sizes == 3 and read(name="a", sizes=None).sizes is None


def test_keys_have_dashes_or_underscores():
    for key in ("num-items", "num_items"):
        assert read(name="a", **{key: 2}).num_items == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "f.yaml: name: missing"),
        ({"name": " "}, "f.yaml: name: got ' ', expected some text"),
        ({"name": "a", "num-itmes": 1}, "f.yaml: unknown setting 'num-itmes'; did you mean num-items?"),
        ({"name": "a", "num_itmes": 1}, "f.yaml: unknown setting 'num_itmes'; did you mean num_items?"),
        ({"name": "a", "num-items": 11}, "f.yaml: num-items: got 11: it must lie in [1, 10]"),
        ({"name": "a", "num-items": None}, "f.yaml: num-items: got None, expected a whole number"),
        ({"name": "a", "is_on": 1}, "f.yaml: is_on: got 1, expected true or false"),
        ({"name": "a", "colours": ["red", "blue"]}, "f.yaml: colours: got 'blue', expected one of red, green"),
        ({"name": "a", "colours": ["red", "red"]}, "f.yaml: colours: got ['red', 'red'], expected values that differ"),
        ({"name": "a", "inner": {"low": 1}}, "f.yaml: inner.low: got 1.0: it must lie in [0, 1)"),
        ({"name": "a", "inner": {"low": 0.6}}, "f.yaml: inner: low 0.6 is above high 0.5"),
        ({"name": "a", "others": [{}, {"low": "x"}]}, "f.yaml: others[2].low: got 'x', expected a number"),
        ({"name": "a", "file": ["x", "y"]}, "f.yaml: file: got ['x', 'y'], expected a path"),
        ({"name": "a", "file": " "}, "f.yaml: file: got ' ', expected a path"),
        ({"name": "a", "inner": [1]}, "f.yaml: inner: expected settings such as `low: …`, got a list"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(values, message):
    with pytest.raises(UserError) as refused:
        read(**values)
    assert str(refused.value) == message and refused.value.exit_code == 2


def test_a_file_that_is_not_yaml_is_named(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(UserError, match=r"f\.yaml: cannot be read: not YAML"):
        load_values(path, Place(str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\ninner:\n  low: 0.1\n  high: 1\n  low: 0.2\n", "line 5: low is given already in line 3"),
        ("seq-length: 1\nseq_length: 2\n", "line 2: seq_length is given already in line 1"),
        ("others: [{low: 0.1, 'low': 0.2}]\n", "line 1: low is given already in line 1"),
    ],
)
def test_a_setting_given_twice_is_refused_with_its_lines(tmp_path, text, message):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        load_values(path, Place("f.yaml"))
    assert str(refused.value) == f"f.yaml: {message}; keep one of them"


def test_an_own_setting_replaces_a_merged_one(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("a: &a {low: 0.1, high: 1}\nb: &b {<<: *a, low: 0.2}\nc: {<<: *b, high: 2}\nd: {<<: [*b, *a]}\n")
    content = load_values(path, Place("f.yaml"))
    assert (content["b"], content["c"]) == ({"low": 0.2, "high": 1}, {"low": 0.2, "high": 2})
    assert content["d"] == content["b"]
    with pytest.raises(UserError, match=r"f\.yaml: num-items: given twice, with dashes and with underscores"):
        read(**{"name": "a", "num_items": 1, "num-items": 2})
