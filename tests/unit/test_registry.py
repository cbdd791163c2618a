"""Plug-ins in the registry: one file may bring several classes, also of one name, and a name in both tables."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, encoding_class, load_plugin, objective_class
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


@pytest.mark.parametrize("values", [{"position-encoding": "near"}, {"model": {"position-encoding": "near"}}])
@pytest.mark.parametrize("one", [True, False])
def test_keys_and_flags_take_names_from_the_plug_ins_of_a_config_file(values: dict, one: bool, tmp_path: Path) -> None:
    plugin, file = write(tmp_path / "mine.py"), tmp_path / "run.yaml"
    file.write_text(json.dumps(values | {"plugin": str(plugin) if one else [str(plugin)]}))  # JSON is YAML
    config = parse_arguments(["--objective", "near", "--config", str(file)]).config
    assert (config.model.position_encoding, config.objective.objective) == ("near", "near")
    assert set(PLUGINS.values()) == {plugin}


def test_a_line_names_the_file_before_its_code_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plugin, file = write(tmp_path / "mine.py"), tmp_path / "run.yaml"
    plugin.write_text("import os\nos.write(2, b'ran\\n')\n" + plugin.read_text())
    file.write_text(f"plugin: {plugin}\n")
    for _ in range(2):
        parse_arguments(["--config", str(file)])
    assert capfd.readouterr().err == f"--config {file}: runs the code of {plugin}\nran\n"


@pytest.mark.parametrize("name", ["config.json", "run.JSON", "run", "run.yaml.txt", "run.yaml"])
@pytest.mark.parametrize("of_a_run", [True, False])
def test_only_a_persons_yaml_names_code(name: str, of_a_run: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    values = Config().replace(model={"vocab_size": 100}).to_dict() if of_a_run else {}
    for plugins in (str(tmp_path / "mine.py"), [str(tmp_path / "mine.py")]):
        (tmp_path / name).write_text(json.dumps(values | {"plugin": plugins}))
        if (name, of_a_run) == ("run.yaml", False):
            with pytest.raises(UserError, match="SystemExit: ran"):
                parse_arguments(["--config", str(tmp_path / name)])
            continue
        with pytest.raises(UserError, match="plugin: only a YAML file of your own may name code.*--plugin") as refused:
            parse_arguments(["--config", str(tmp_path / name)])
        assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"mine.py": 1}, "run.yaml: plugin: got {'mine.py': 1}, expected a list of files, such as [my_encoding.py]"),
        ([3], "run.yaml: plugin: got [3], expected a list of files"),
        (["nowhere.py"], "run.yaml: plugin: --plugin "),
    ],
)
def test_wrong_plug_ins_of_a_config_file_are_refused_in_one_line(listed: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({"plugin": listed}))
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert "\n" not in str(refused.value)


FUNCTION, CLASS = "def f(step, warmup, last, config): return 1\n", "class C({}):\n    {}\n"
CALLBACK = "from megatron_ddrp.run.metrics import Callback\n"
KIND = "from megatron_ddrp.tasks.finetune.kinds.contract import Kind\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('SCHEDULES = ["a"]', r"SCHEDULES is \['a'\]: expected a dictionary, name → class or function"),
        ("KINDS = None", "KINDS is None: expected a dictionary"),
        (FUNCTION + "SCHEDULES = {1: f}", "SCHEDULES is .*: expected a dictionary"),
        (FUNCTION + "METRICS = {'f': f}", "expected a function with an attribute kinds, a list"),
        (FUNCTION + "f.kinds = 5\nMETRICS = {'f': f}", "expected a function with an attribute kinds, a list"),
        (FUNCTION + "f.kinds = ['qa']\nMETRICS = {'f': f}", "expected a function that takes .labels, predictions."),
        ("SCHEDULES = {'f': lambda step: 1}", "expected a function that takes .step, warmup, last, config."),
        (CALLBACK + "CALLBACKS = {'c': Callback()}", "expected a class derived from Callback"),
        (
            CALLBACK + CLASS.format("Callback", "def __init__(self, x): pass") + "CALLBACKS = {'c': C}",
            "expected a class derived from Callback that takes \\(\\)",
        ),
        (KIND + CLASS.format("Kind", "name = 'c'") + "KINDS = {'c': C}", "expected a class .* that defines .*label"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)
def test_what_a_plug_in_may_not_bring_is_refused_in_one_line(code: str, line: str, tmp_path: Path) -> None:
    before = dict(PLUGINS)
    with pytest.raises(UserError, match=line) as refused:
        load_plugin(write(tmp_path / "mine.py", code))
    assert "\n" not in str(refused.value) and before == PLUGINS


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UserError, match="--objective nothing is not known: expected one of mlm, mth, .*--plugin"):
        objective_class("nothing")
