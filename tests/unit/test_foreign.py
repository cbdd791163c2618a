"""The door for foreign files: what it refuses, and that no code reads such a file beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

from megatron_ddrp.data.atomic import file_fault
from megatron_ddrp.data.dataset.dataset_index import file_size
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import (
    LARGEST_YAML,
    Name,
    misfit,
    parse_json,
    parse_yaml,
    read_bytes,
    read_object,
    reading,
    stand_in,
)
from tests.sources import Trees

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


def imports(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.name for node in nodes for alias in node.names} | {str(getattr(n, "module", "")) for n in nodes}


def test_no_code_reads_a_foreign_file_beside_the_door() -> None:
    found = {file: list(calls_beside_the_door(tree)) for file, tree in TREES.items() if file != "foreign.py"}
    assert {file: names for file, names in found.items() if names} == {}


def test_only_one_file_unpacks() -> None:
    assert {file for file, tree in TREES.items() if imports(tree) & UNPACKERS} == {"data/preprocess/inputs.py"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("json.loads(x)", ["json.loads"]),
        ("def f():\n    with reading(p), open(p) as s:\n        return torch.load(s)", []),
        ("with reading(p):\n    pass\ntorch.load(p)", ["torch.load"]),
        ("pyarrow.parquet.ParquetFile(p)", ["pyarrow.parquet.ParquetFile"]),
        ("try:\n    snapshot_download(p)\nexcept Exception:\n    pass", []),
        ("try:\n    snapshot_download(p)\nexcept OSError:\n    pass", ["snapshot_download"]),
    ],
)
def test_the_finder_sees_what_it_should(source: str, expected: list[str]) -> None:
    assert list(calls_beside_the_door(ast.parse(source))) == expected


POINTER = f"version https://git-lfs.github.com/spec/v1\next-0-a sha256:{'0' * 64}\noid sha256:{'1' * 64}\nsize 123\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_pointer_of_git_lfs_is_named_by_every_reader(tmp_path: Path, end: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(POINTER.replace("\n", end).encode())

    def by_a_library(path: Path) -> None:
        with reading(path, "damaged"):
            raise KeyError

    for read in (read_bytes, read_object, by_a_library, file_size, lambda path: file_fault(path, {"bytes": 1})):
        with pytest.raises(UserError) as refused:
            read(file)
        assert str(refused.value).startswith(f"{file}: a pointer of Git LFS in place of the file: run git lfs install")
    with pytest.raises(ValueError, match="^a pointer of Git LFS"):
        parse_json(file.read_bytes())
    assert not stand_in(f"{POINTER}\nThis is how a pointer begins.")


class Panic(BaseException):
    """Like the panic of a library in Rust."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Panic("at the disco\nbacktrace"), "f: not a model (at the disco)"),
        (KeyError(), "f: not a model (KeyError)"),
        (OSError("Couldn't deserialize"), "f: not a model (Couldn't deserialize)"),
        (PermissionError(13, "Permission denied"), "f: Permission denied; give a readable file"),
        (UserError("own words"), "own words"),
    ],
)
def test_every_error_of_a_library_becomes_one_line(error: BaseException, line: str) -> None:
    with pytest.raises(UserError) as refused, reading("f", "not a model ({error})"):
        raise error
    assert str(refused.value) == line


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(1), RuntimeError("out of memory")])
def test_interrupts_and_lack_of_memory_pass(error: BaseException) -> None:
    with pytest.raises(type(error)), reading("f"):
        raise error


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' is twice in one object"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": 1e999}', "1e999 is too large a number"),
        (b'{"a": ' + b"7" * 5000 + b"}", "a number of 5,000 digits, expected at most 308"),
        (b'["\\ud83d"]', "holds half a surrogate pair, which is no character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[1", "Expecting ',' delimiter: line 1 column 3 (char 2)"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as refused:
        read_object(file)
    assert str(refused.value) == f"{file}: not JSON ({reason}); copy the file again"


def test_lenient_json_is_that_of_the_library() -> None:
    text = b'\xef\xbb\xbf{"a": 1, "a": [Infinity, "\\ud83d"]}'
    assert parse_json(text, lenient=True) == {"a": [float("inf"), "\ud83d"]}
    with pytest.raises(ValueError, match="5,000 digits"):
        parse_json("7" * 5000, lenient=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a: !!set {b}", "not YAML: could not determine a constructor for the tag"),
        (b"a: !!timestamp 2020-01-01", "not YAML: could not determine a constructor"),
        (b"a: " + b"7" * 5000, "a number of 5,000 digits, expected at most 308"),
        (b"a: 0x" + b"f" * 300, "a number of 362 digits, expected at most 308"),
        (b'a: "\\ud83d"', "line 1: half a surrogate pair"),
        (b"[" * 3000, "nested too deeply"),
        (b"? [1]\n: 2", "not YAML: while constructing a mapping"),
        (b"a: \xff", "not YAML: not UTF-8 at byte 3"),
    ],
)
def test_yaml_that_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_yaml(text)
    assert str(refused.value).startswith(reason)


def test_yaml_holds_plain_values_only() -> None:
    text = b"day: 2020-01-01\nhex: 0x10\nreal: 1.5\nyes: [on, ~]\n"
    assert parse_yaml(text) == {"day": "2020-01-01", "hex": 16, "real": 1.5, True: [True, None]}


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero: more than 4 MiB, expected a smaller file"):
        read_bytes("/dev/zero", LARGEST_YAML)


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
