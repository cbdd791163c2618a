"""Plug-ins in the registry: one file may bring several classes, also of one name, and a name in both tables."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ddrp.config import ENCODINGS, OBJECTIVES, encoding_class, load_plugin, objective_class
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.errors import UserError

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


def test_a_file_brings_every_class_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py")
    load_plugin(path)
    load_plugin(path)
    assert [encoding_class(name).relative_distance for name in ("near", "far")] == [8, 99]
    assert objective_class("near").mask_share == 0.5
    assert set(PLUGINS.values()) == {path} and len(PLUGINS) == 3


def test_a_second_file_may_not_take_a_name_of_the_first(tmp_path: Path) -> None:
    load_plugin(write(tmp_path / "one.py"))
    with pytest.raises(UserError, match="ENCODINGS names 'near', which is taken"):
        load_plugin(write(tmp_path / "two.py"))


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UserError, match="--objective nothing is not known: expected one of mlm, mth, .*--plugin"):
        objective_class("nothing")
