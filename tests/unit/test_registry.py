"""Files of others: what their readers refuse, settings from YAML by their dataclasses, and plug-ins in the registry."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from megatron_ddrp import foreign
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, encoding_class, load_plugin, objective_class
from megatron_ddrp.config.reading import Place, load_values, option, read_section, refuse
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.data.atomic import file_fault
from megatron_ddrp.data.dataset.dataset_index import file_size
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import LARGEST_YAML, Name, misfit, parse_json, parse_yaml, read_bytes, read_object, reading
from tests.changed import imports_of
from tests.refusals import refused, wrong_arguments
from tests.sources import Trees

CODE = """
from megatron_ddrp.model.positions import PositionEncoding
from megatron_ddrp.objectives.contract import Objective

def make(distance):
    class Mine(PositionEncoding):
        relative_distance = distance
    return Mine

class Own(Objective):
    mask_share = 0.5

ENCODINGS = {"near": make(8), "far": make(99)}
OBJECTIVES = {"near": Own}
"""
POINTER = f"version https://git-lfs.github.com/spec/v1\next-0-a sha256:{'0' * 64}\noid sha256:{'1' * 64}\nsize 123\n"


@pytest.fixture(autouse=True)
def _tables_as_before() -> Iterator[None]:
    tables = (ENCODINGS, OBJECTIVES, PLUGINS)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)  # type: ignore[arg-type]


def write(path: Path, code: str = CODE) -> Path:
    path.write_text(code)
    return path


def test_a_file_brings_every_class_that_it_names_and_a_second_takes_none(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py")
    load_plugin(path)
    load_plugin(path)
    assert [encoding_class(name).relative_distance for name in ("near", "far")] == [8, 99]
    assert objective_class("near").mask_share == 0.5
    assert set(PLUGINS.values()) == {path} and len(PLUGINS) == 3
    refused("ENCODINGS names 'near', which is taken", load_plugin, write(tmp_path / "two.py"))
    refused("--objective nothing is not known: expected one of mlm, mth, .*--plugin", objective_class, "nothing")


@pytest.mark.parametrize("values", [{"position-encoding": "near"}, {"model": {"position-encoding": "near"}}])
@pytest.mark.parametrize("one", [True, False])
def test_names_come_from_the_plug_ins_of_a_config_file_which_a_line_names_before_they_run(values, one, tmp_path, capfd):
    plugin, file = write(tmp_path / "mine.py", "import os\nos.write(2, b'ran\\n')\n" + CODE), tmp_path / "run.yaml"
    file.write_text(json.dumps(values | {"plugin": str(plugin) if one else [str(plugin)]}))  # JSON is YAML
    for _ in range(2):
        config = parse_arguments(["--objective", "near", "--config", str(file)]).config
        assert (config.model.position_encoding, config.objective.objective) == ("near", "near")
    assert set(PLUGINS.values()) == {plugin}
    assert capfd.readouterr().err == f"--config {file}: runs the code of {plugin}\nran\n"


@pytest.mark.parametrize("name", ["config.json", "run.JSON", "run", "run.yaml.txt", "run.yaml"])
@pytest.mark.parametrize("of_a_run", [True, False])
def test_only_a_persons_yaml_names_code(name: str, of_a_run: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    values = Config().replace(model={"vocab_size": 100}).to_dict() if of_a_run else {}
    for plugins in (str(tmp_path / "mine.py"), [str(tmp_path / "mine.py")]):
        (tmp_path / name).write_text(json.dumps(values | {"plugin": plugins}))
        words = ["--config", str(tmp_path / name)]
        if (name, of_a_run) == ("run.yaml", False):
            refused("SystemExit: ran", parse_arguments, words)
        else:
            wrong_arguments("plugin: only a YAML file of your own may name code.*--plugin", parse_arguments, words)


FUNCTION = "def f(step, warmup, last, config): return 1\n"
OF_CALLBACK = "from megatron_ddrp.run.metrics import Callback\nclass C(Callback):\n def __init__(self, x): pass\n"
OF_KIND = "from megatron_ddrp.tasks.finetune.kinds.contract import Kind\nclass C(Kind):\n name = 'c'\n"
LISTED = [
    ({"mine.py": 1}, "run.yaml: plugin: got {'mine.py': 1}, expected a list of files, such as [my_encoding.py]"),
    ([3], "run.yaml: plugin: got [3], expected a list of files"),
    (["nowhere.py"], "run.yaml: plugin: --plugin "),
]
BROUGHT = [
    ('SCHEDULES = ["a"]', r"SCHEDULES is \['a'\]: expected a dictionary, name → class or function"),
    (FUNCTION + "SCHEDULES = {1: f}", "SCHEDULES is .*: expected a dictionary"),
    (FUNCTION + "f.kinds = 5\nMETRICS = {'f': f}", "expected a function with an attribute kinds, a list"),
    (FUNCTION + "f.kinds = ['qa']\nMETRICS = {'f': f}", "expected a function that takes .labels, predictions."),
    (OF_CALLBACK + "CALLBACKS = {'c': Callback()}", "expected a class derived from Callback"),
    (OF_CALLBACK + "CALLBACKS = {'c': C}", "expected a class derived from Callback that takes \\(\\)"),
    (OF_KIND + "KINDS = {'c': C}", "expected a class .* that defines .*label"),
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
]


@pytest.mark.parametrize(("listed", "message"), LISTED)
def test_wrong_plug_ins_of_a_config_file_are_refused_in_one_line(listed: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({"plugin": listed}))
    refused(re.escape(message), parse_arguments, ["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(("code", "line"), BROUGHT)
def test_what_a_plug_in_may_not_bring_is_refused_in_one_line(code: str, line: str, tmp_path: Path) -> None:
    before = dict(PLUGINS)
    refused(line, load_plugin, write(tmp_path / "mine.py", code))
    assert before == PLUGINS


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


def test_values_take_the_type_of_their_option_whose_key_has_dashes_or_underscores():
    found = read(name=7, colours="red", sizes=[1, 2], inner={"low": "1e-1"}, others=[{"high": 0.25}, {}], is_on=True)
    assert found == Outer("7", 1, ("red",), (1, 2), True, Inner(0.1), (Inner(high=0.25), Inner()))
    assert read(name="a", sizes=3.0).sizes == 3 and read(name="a", sizes=None).sizes is None
    for key in ("num-items", "num_items"):
        assert read(name="a", **{key: 2}).num_items == 2


A = {"name": "a"}
WRONG = [
    ({}, "name: missing"),
    ({"name": " "}, "name: got ' ', expected some text"),
    (A | {"num-itmes": 1}, "unknown setting 'num-itmes'; did you mean num-items?"),
    (A | {"num_itmes": 1}, "unknown setting 'num_itmes'; did you mean num_items?"),
    (A | {"num-items": 11}, "num-items: got 11: it must lie in [1, 10]"),
    (A | {"num-items": None}, "num-items: got None, expected a whole number"),
    ({"is_on": True, "is-on": True}, "is-on: given twice, with dashes and with underscores; keep one of them"),
    (A | {"is_on": 1}, "is_on: got 1, expected true or false"),
    (A | {"colours": ["red", "blue"]}, "colours: got 'blue', expected one of red, green"),
    (A | {"colours": ["red", "red"]}, "colours: got ['red', 'red'], expected values that differ"),
    (A | {"inner": {"low": 1}}, "inner.low: got 1.0: it must lie in [0, 1)"),
    (A | {"inner": {"low": 0.6}}, "inner: low 0.6 is above high 0.5"),
    (A | {"others": [{}, {"low": "x"}]}, "others[2].low: got 'x', expected a number"),
    (A | {"file": ["x", "y"]}, "file: got ['x', 'y'], expected a path"),
    (A | {"file": " "}, "file: got ' ', expected a path"),
    (A | {"inner": [1]}, "inner: expected settings such as `low: …`, got a list"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_a_wrong_setting_is_named_with_its_place(values, message):
    assert str(wrong_arguments("", read, **values)) == f"f.yaml: {message}"


def test_a_setting_given_twice_and_no_yaml_are_refused_and_an_own_one_replaces_a_merged_one(tmp_path):
    path = tmp_path / "f.yaml"
    for text, message in (
        ("name: a\ninner:\n  low: 0.1\n  high: 1\n  low: 0.2\n", "line 5: low is given already in line 3"),
        ("seq-length: 1\nseq_length: 2\n", "line 2: seq_length is given already in line 1"),
        ("others: [{low: 0.1, 'low': 0.2}]\n", "line 1: low is given already in line 1"),
    ):
        path.write_text(text)
        line = f"^{re.escape(f'f.yaml: {message}; keep one of them')}$"
        refused(line, load_values, path, Place("f.yaml"))
    path.write_text("a: &a {low: 0.1, high: 1}\nb: &b {<<: *a, low: 0.2}\nc: {<<: *b, high: 2}\nd: {<<: [*b, *a]}\n")
    content = load_values(path, Place("f.yaml"))
    assert (content["b"], content["c"]) == ({"low": 0.2, "high": 1}, {"low": 0.2, "high": 2})
    assert content["d"] == content["b"]
    path.write_bytes(b"a: \xff")
    refused(r"f\.yaml: cannot be read: not YAML", load_values, path, Place(str(path)))


PACKAGE = Path(__file__).parents[2] / "megatron_ddrp"
TREES = Trees({file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")})

READERS = {
    *("json.load", "json.loads", "yaml.load", "yaml.safe_load", "torch.load", "np.load", "numpy.load", "pickle.load"),
    *("torch.load_file", "safe_open", "RustTokenizer.from_file", "RustTokenizer.from_buffer", "ParquetFile"),
    *("SentencePieceProcessor", "AutoTokenizer.from_pretrained", "AutoConfig.from_pretrained"),
    *("DdrpConfig.from_pretrained", "snapshot_download", "hf_hub_download"),
}
"""Calls of libraries that read a foreign file, by the ends of their names."""
UNPACKERS = {"bz2", "gzip", "lzma", "zlib.decompressobj", "zstandard"}
"""Modules, and one function, that unpack files."""


def calls_beside_the_door(tree: ast.AST, in_door: bool = False) -> Iterator[str]:
    """Yield the calls of `READERS` that no door encloses: `with reading(...)`, or `except Exception`."""
    if isinstance(tree, ast.With) and any("reading(" in ast.unparse(item.context_expr) for item in tree.items):
        in_door = True
    if isinstance(tree, ast.Try) and any(ast.unparse(each.type or tree) == "Exception" for each in tree.handlers):
        in_door = True
    if isinstance(tree, ast.Call) and not in_door:
        name = ast.unparse(tree.func)
        if any(name == reader or name.endswith(f".{reader}") for reader in READERS):
            yield name
    for child in ast.iter_child_nodes(tree):
        yield from calls_beside_the_door(child, in_door)


def test_no_code_reads_or_unpacks_a_foreign_file_beside_the_door() -> None:
    found = {file: list(calls_beside_the_door(tree)) for file, tree in TREES.items() if file != "foreign.py"}
    assert {file: names for file, names in found.items() if names} == {}
    unpacking = [file for file, tree in TREES.items() if imports_of(tree, frozenset()) & UNPACKERS]
    assert unpacking == ["data/preprocess/inputs.py"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_pointer_of_git_lfs_is_named_by_every_reader(tmp_path: Path, end: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(POINTER.replace("\n", end).encode())

    def by_a_library(path: Path) -> None:
        with reading(path, "damaged"):
            raise KeyError

    for read in (read_bytes, read_object, by_a_library, file_size, lambda path: file_fault(path, {"bytes": 1})):
        refused(f"^{file}: a pointer of Git LFS in place of the file: run git lfs install", read, file)
    with pytest.raises(ValueError, match="^a pointer of Git LFS"):
        parse_json(file.read_bytes())
    assert not foreign.stand_in(f"{POINTER}\nThis is how a pointer begins.")


class Panic(BaseException):
    """Like the panic of a library in Rust."""


def test_every_error_of_a_library_becomes_one_line_but_interrupts_and_lack_of_memory_pass() -> None:
    for error, line in (
        (Panic("at the disco\nbacktrace"), "f: not a model (at the disco)"),
        (KeyError(), "f: not a model (KeyError)"),
        (OSError("Couldn't deserialize"), "f: not a model (Couldn't deserialize)"),
        (PermissionError(13, "Permission denied"), "f: Permission denied; give a readable file"),
        (UserError("own words"), "own words"),
    ):
        with pytest.raises(UserError) as caught, reading("f", "not a model ({error})"):
            raise error
        assert str(caught.value) == line
    for error in (KeyboardInterrupt(), MemoryError(), SystemExit(1), RuntimeError("out of memory")):
        with pytest.raises(type(error)), reading("f"):
            raise error


OF_JSON = [
    (b'{"a": 1, "a": 2}', "key 'a' is twice in one object"),
    (b'{"a": NaN}', "NaN is no number of JSON"),
    (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
    (b'{"a": 1e999}', "1e999 is too large a number"),
    (b'{"a": ' + b"7" * 5000 + b"}", "a number of 5,000 digits, expected at most 308"),
    (b'["\\ud83d"]', "holds half a surrogate pair, which is no character"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    (b"[1", "Expecting ',' delimiter: line 1 column 3 (char 2)"),
]
OF_YAML = [
    (b"a: !!set {b}", "not YAML: could not determine a constructor for the tag"),
    (b"a: !!timestamp 2020-01-01", "not YAML: could not determine a constructor"),
    (b"a: " + b"7" * 5000, "a number of 5,000 digits, expected at most 308"),
    (b"a: 0x" + b"f" * 300, "a number of 362 digits, expected at most 308"),
    (b'a: "\\ud83d"', "line 1: half a surrogate pair"),
    (b"[" * 3000, "nested too deeply"),
    (b"? [1]\n: 2", "not YAML: while constructing a mapping"),
    (b"a: \xff", "not YAML: not UTF-8 at byte 3"),
]


@pytest.mark.parametrize(("text", "reason"), OF_JSON)
def test_json_that_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(text)
    assert str(refused("not JSON", read_object, file)) == f"{file}: not JSON ({reason}); copy the file again"


@pytest.mark.parametrize(("text", "reason"), OF_YAML)
def test_yaml_that_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        parse_yaml(text)


def test_lenient_json_is_that_of_the_library_and_yaml_holds_plain_values_of_a_size_only() -> None:
    text = b'\xef\xbb\xbf{"a": 1, "a": [Infinity, "\\ud83d"]}'
    assert parse_json(text, lenient=True) == {"a": [float("inf"), "\ud83d"]}
    with pytest.raises(ValueError, match="5,000 digits"):
        parse_json("7" * 5000, lenient=True)
    text = b"day: 2020-01-01\nhex: 0x10\nreal: 1.5\nyes: [on, ~]\n"
    assert parse_yaml(text) == {"day": "2020-01-01", "hex": 16, "real": 1.5, True: [True, None]}
    refused("/dev/zero: more than 4 MiB, expected a smaller file", read_bytes, "/dev/zero", LARGEST_YAML)


COUNT = Annotated[int, "[0, 1e15)"]
FITTING = [
    *((3, int), (3, float), (3.5, float), (True, bool), ("", str), (None, float | None), (2, COUNT), ("a", Name)),
    *(([1, 2.5], tuple[int, float]), ([], tuple[int, ...]), ({"a": [0]}, Mapping[str, Sequence[COUNT]])),
    *(("post", ("post", "pre")), (None, (float, None)), ({}, ({}, None)), ({"a": {"b": 1, "c": 2}}, {"a": {"b": int}})),
    *(([[1], "x"], object), (1, Annotated[float, "(0, 1]"])),
]
MISFITS = [
    (True, int, "expected a whole number"),
    (1, bool, "expected true or false"),
    (3.0, int, "expected a whole number"),
    (float("nan"), float, "expected a number"),
    (10**400, float, "expected a number"),
    (-1, COUNT, "expected a whole number of at least 0"),
    (0, Annotated[float, "(0, 1]"], "expected a number in (0, 1]"),
    (1.5, Annotated[float, "[0, 1]"], "expected a number from 0 to 1"),
    (" ", Name, "expected some text that is not empty"),
    (1, (True, None), "expected True or null"),
    ({"a": [-1]}, Mapping[str, Sequence[COUNT]], "expected an object of lists of whole numbers of at least 0"),
    ([1], tuple[int, int], "expected a list of whole numbers"),
    (7, tuple[int, ...], "expected a list of whole numbers"),
    ({"a": "x"}, Annotated[Mapping[str, int], "an object of counts"], "expected an object of counts"),
    ({"a": 1}, {"a": int, "b": str}, "b is missing"),
    ({"a": {"b": None}}, {"a": {"b": str}}, "a: got {'b': None}, b: got None, expected some text"),
    ([], {"a": int, "b": str}, "expected an object with a, b"),
]


@pytest.mark.parametrize(("value", "hint", "line"), [*((*case, "") for case in FITTING), *MISFITS], ids=repr)
def test_a_value_of_json_is_held_to_a_type_hint(value: Any, hint: Any, line: str) -> None:
    assert misfit(value, hint) == line
