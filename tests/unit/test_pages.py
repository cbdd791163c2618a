"""README.md, the pages of docs/, CONTRIBUTING.md and the files of packaging hold what the code says.

`python -m tests.unit.test_pages` prints the tables of flags of docs/foreign-files.md.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.pages import written_table
from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import ENCODINGS, OBJECTIVES, ModelConfig, encoding_class, flag, objective_class, translation
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.pages.markdown import block_names, read_block, replace_blocks
from tests.endurance.docker_steps import context_files, read_dockerfile
from tests.endurance.floors import floor_of, requirements
from tests.refusals import refused
from tools.site_pages import CODE, ROOT

PLACES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in PLACES}
"""Text of each page by its path."""
FOREIGN = PAGES["docs/foreign-files.md"]
MOST_WORDS = 120
ENTRY = re.compile(r"^\s*(?:[-*]|\d+\.) ")
"""Begin of an entry of a list, which is a paragraph of its own."""
NO_PROSE = re.compile(r"^\s*(?:\||#|!\[)")
"""Begin of a line of a table, a heading or a picture."""


def without_blocks(text: str) -> str:
    """Return the text without its blocks of code and its comments; code inside a line stays."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return CODE.sub(lambda code: code[0] if re.match("`[^`]", code[0]) else "", text)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a Markdown document as single lines, without blocks of code."""
    words: list[str] = []
    for line in [*without_blocks(text).splitlines(), ""]:
        ends = not line.strip() or NO_PROSE.match(line)
        if (ends or ENTRY.match(line)) and words:
            yield " ".join(words)
            words = []
        words += [] if ends else line.split()


@pytest.mark.parametrize("page", PAGES)
def test_no_paragraph_is_long_and_none_installs_a_release_that_does_not_exist(page: str) -> None:
    found = [paragraph.split() for paragraph in paragraphs(PAGES[page])]
    long = [f"{len(words)} words: {' '.join(words[:12])} …" for words in found if len(words) > MOST_WORDS]
    assert found and not long, "\n".join(long)
    assert not re.search(r"pip install '?megatron-ddrp", PAGES[page])


def test_the_readme_is_read_in_minutes_and_paragraphs_are_found() -> None:
    assert 300 < len(without_blocks(PAGES["README.md"]).split()) <= 700
    text = "# Title\n\none two\nthree `four five`\n\n```\ncode\n```\n- six\n- seven\n  eight\n| nine |\n\n    code\n"
    assert list(paragraphs(text)) == ["one two three `four five`", "- six", "- seven eight"]


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OF_PACKAGING = ("Makefile", "requirements-lock.txt", "pyproject.toml")
MAKEFILE, LOCK, PROJECT = ((ROOT / name).read_text(encoding="utf-8") for name in OF_PACKAGING)


def test_the_lock_holds_a_fitting_version_of_every_requirement_and_names_no_host_and_no_build_of_torch() -> None:
    """Torch and triton are chosen by the user's build."""
    project = tomllib.loads(PROJECT)["project"]
    words = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    locked = [Requirement(line) for line in LOCK.splitlines() if not line.startswith("#")]
    required = {each.name.lower(): each for each in map(Requirement, words)}
    assert {"deepspeed", "transformers", "ruff", "types-pyyaml", "mkdocs-material"} <= required.keys()
    for requirement in map(Requirement, words):
        if requirement.name not in ("torch", "triton", project["name"]):
            versions = [str(lock.specifier)[2:] for lock in locked if lock.name == requirement.name.lower()]
            assert versions and all(map(requirement.specifier.contains, versions)), requirement
    assert not re.search(r"://|^--|^-|^(torch|triton|nvidia-\S+)==", LOCK, re.MULTILINE)
    assert f"installs {makefile_value('TORCH')} " in LOCK.splitlines()[0]


def test_the_page_has_the_floors_as_versions_that_were_run() -> None:
    rows = re.findall(r"^\| ([a-z0-9]+) \| ([0-9.]+) \| [0-9.]+ \|$", PAGES["docs/install.md"], re.MULTILINE)
    floors = {requirement.name: floor_of(requirement) for requirement in chain(*requirements().values())}
    assert {name: Version(lowest) for name, lowest in rows} == floors, "make floors prints the table"


def makefile_value(name: str) -> str:
    return re.findall(rf"^{name} +\?= *(.*)$", MAKEFILE, re.MULTILINE)[0]


@pytest.mark.parametrize("index", ["", "https://host/cpu"])
def test_the_images_steps_install_torch_first_from_the_given_index(index: str, tmp_path: Path) -> None:
    """Every RUN line runs in a shell that knows stand-ins alone, which note their words."""
    dockerfile = read_dockerfile()
    for name in ("pip", "apt-get", "useradd", "chmod", "rm"):
        (tmp_path / name).write_text(f'#!/bin/sh\nIFS="|"\necho "{name}|$*"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**dockerfile.defaults("ARG"), "TORCH_INDEX": index, "TORCH": "torch==9", "PATH": str(tmp_path)}
    command = ["/bin/sh", "-euc", "\n".join(dockerfile.all_of("RUN"))]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    torch, package = (line.split("|") for line in said.splitlines() if line.startswith("pip|"))
    assert torch == ["pip", "install", "--no-cache-dir", "torch==9", *(["--extra-index-url", index] if index else [])]
    extras = re.fullmatch(r"/src\[(.*)\]", package[-1])
    assert extras and all(re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE) for extra in extras[1].split(","))
    assert package[2:5] == ["--no-cache-dir", "--constraint", "/src/requirements-lock.txt"]


def test_the_image_copies_what_its_package_needs_and_runs_the_command_and_not_as_root() -> None:
    files, dockerfile = set(map(str, context_files())), read_dockerfile()
    assert {"pyproject.toml", "README.md", "requirements-lock.txt", "megatron_ddrp/errors.py"} <= files
    assert not any(file.startswith(("tests/", "docs/", ".git")) for file in files)
    assert dockerfile.defaults("ARG")["TORCH"] == makefile_value("TORCH")
    assert dockerfile.all_of("USER") == ["megatron"]
    assert "RUN" not in "".join(name for name, _ in dockerfile.instructions).partition("USER")[2]
    assert json.loads(dockerfile.all_of("ENTRYPOINT")[0]) == ["megatron-ddrp"]


def test_integration_runs_every_test_once_and_the_workflow_and_hooks_run_its_steps() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"\bmake .*", script.split("set -euo pipefail")[1]) == ["make lint docs", "make test"]
    assert "\n\t$(PYTEST) $(TESTS)\n" in MAKEFILE and "\ncheck: lint docs " in MAKEFILE
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    tests = workflow["jobs"]["tests"]
    assert {"run": ".ci/run"} in tests["steps"]
    assert tests["env"]["TORCH"].split()[0] == makefile_value("TORCH")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    lint = MAKEFILE.split("\nlint:")[1].split("\n\n")[0]
    assert [hook for hook in hooks if hook["entry"].replace(".venv/bin", "$(BIN)") not in lint] == []


def shown(names: str) -> str:
    return " ".join(f"`--{name.rstrip('=')}`" for name in names.split())


def values_of(by_value: translation.ByValue) -> str:
    """Return the values at which a flag is taken as they stand in a cell."""
    words = [f"`{value}`" + (f" as `{ours}`" if ours else "") for value, ours in by_value.words.items()]
    return f"{', '.join(words)}; else: {by_value.otherwise or 'as for our own flag'}"


def tables() -> Iterator[str]:
    """Yield the tables of flags of docs/foreign-files.md, in its order."""
    rows_of = [
        ("why it changes no number here | flags", translation.WITHOUT_EFFECT, str, shown),
        ("flag | read as", translation.RENAMED, shown, lambda ours: f"`{ours.replace('{}', 'X')}`"),
        ("flag | taken at these values", translation.BY_VALUE, shown, values_of),
        ("default here | Megatron-LM's", translation.THEIR_DEFAULTS, lambda name: f"`{flag(name)}`", str),
        ("DeepSpeed | flag", translation.SETTINGS, "`{}`".format, lambda name: f"`{flag(name)}`"),
        ("flag | here", translation.REMEDIES, shown, str),
    ]
    for head, rows, left, right in rows_of:
        yield "\n".join([f"| {head} |\n| --- | --- |", *(f"| {left(key)} | {right(rows[key])} |" for key in rows)])


@pytest.mark.parametrize("number", range(6))
def test_the_page_holds_the_tables_of_the_program(number: int) -> None:
    assert [*tables()][number] in FOREIGN, "print it: python -m tests.unit.test_pages"


def test_the_command_for_megatrons_model_leaves_no_default_that_differs() -> None:
    command = re.search(r"```bash\n(megatron-ddrp pretrain .*?)```", FOREIGN, re.S)
    assert command, "no command on the page"
    (remark,) = parse_arguments(command[1].replace("\\\n", " ").split()[2:]).remarks
    assert "--bert-no-binary-head as --num-segments 0" in remark


def test_names_on_the_page_are_flags_of_ours_or_of_the_tables_and_no_rule_is_missing() -> None:
    own = {name for action in build_parser()._actions for name in action.option_strings}
    tables = (translation.RENAMED, translation.BY_VALUE, translation.REMEDIES, translation.RULES)
    names = " ".join(chain(translation.WITHOUT_EFFECT.values(), *tables)).split()
    known = {*own, *(f"--{name.rstrip('=')}" for name in names), "--from-hf", "--deepspeed_config"}
    assert set(re.findall(r"(?<![\w`-])`(--[A-Za-z][\w-]*)", FOREIGN)) <= known
    assert all(f"`--{name.rstrip('=')}`" in FOREIGN for name in translation.RULES)


def test_the_lines_that_a_diff_adds_are_in_its_file_and_the_encoding_and_the_kind_of_task_are_whole() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    added: dict[str, list[str]] = {}
    diffs = "\n".join(re.findall(r"```diff\n.*?```", text, re.DOTALL))
    for diff in re.split(r"^\+\+\+ b/", diffs, flags=re.MULTILINE)[1:]:
        file, *lines = diff.partition("```")[0].splitlines()
        added.setdefault(file, []).extend(line[1:] for line in lines if line[:1] == "+")
    parts = ("config/registry", "model/positions/biases", "objectives/masked", "tasks/finetune/metrics", "tasks/glue")
    assert added.keys() >= {f"megatron_ddrp/{part}.py" for part in parts}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in added}
    assert [line for file in added for line in added[file] if line not in texts[file].splitlines()] == []

    encoding, kind = "megatron_ddrp/model/positions/biases.py", "megatron_ddrp/tasks/finetune/kinds/regression.py"
    (whole,) = (node for node in ast.parse(texts[encoding]).body if getattr(node, "name", "") == "T5")
    assert "\n".join(added[encoding]) == ast.get_source_segment(texts[encoding], whole)
    shown, without_docstrings = ast.parse("\n".join(added[kind])), ast.parse(texts[kind])
    for node in ast.walk(without_docstrings):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    assert ast.unparse(shown) == ast.unparse(without_docstrings)


def rows() -> list[tuple[list[str], int]]:
    """Return (tests as `FILE::FUNCTION`, number of cases) of each row of the tables."""
    tables = FOREIGN.partition("\n## Files\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\| *(\d+) *\|?$", tables, re.MULTILINE)
    assert found, "no table in the section Files"
    return [(re.findall(r"`(\w+(?:/\w+)*\.py::\w+)`", tests), int(number)) for tests, number in found]


def test_the_table_counts_the_cases_of_its_tests(request: pytest.FixtureRequest) -> None:
    cases = Counter(item.nodeid.removeprefix("tests/").split("[")[0] for item in request.session.items)
    named = {test for tests, _ in rows() for test in tests}
    for test in named:
        file, function = test.split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
    if not named <= cases.keys():
        pytest.skip("counts cases where all tests are collected: in the whole suite")
    assert rows() == [(tests, sum(cases[test] for test in tests)) for tests, _ in rows()]


def test_every_encoding_has_its_row_with_its_parameters_and_its_distance() -> None:
    rows = re.findall(r"^\| `(.+?)` \| .+ \| ([\d,]+) \| (.+?) \| .+ \|$", PAGES["docs/encodings.md"], re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ENCODINGS)
    for name, parameters, distance in rows:
        counted = count_parameters(on_meta_device(ModelConfig(position_encoding=name)))[1]
        assert counted == int(parameters.replace(",", "")), name
        own = encoding_class(name)
        unread = "refused" if own.relative_distance is None else "unused"
        assert distance.split(",")[0] == str(own.is_relative and own.relative_distance or unread), name


def test_every_objective_has_its_row_with_its_weights_and_every_flag_stands_on_its_page() -> None:
    rows = dict(re.findall(r"^\| `([a-z]\S+)` \| (.+?) \| .+ \|$", PAGES["docs/objectives.md"], re.MULTILINE))
    assert sorted(rows) == sorted(OBJECTIVES)
    for name, formula in rows.items():
        own = objective_class(name)
        weights = {"TCD": own.tcd_weight, "HCD": own.hcd_weight, "RTD": own.rtd_weight * own.generates}
        for term, weight in weights.items():
            found = re.search(rf"(?:([\d.]+)·)?{term}", formula)
            assert weight == (float(found[1] or 1) if found else 0), (name, term)
    named = {name.replace("_", "-") for name in re.findall(r"--[a-z][a-z0-9_-]*", PAGES["docs/flags.md"])}
    shown = [action for action in build_parser()._actions if action.help is not argparse.SUPPRESS]
    assert len(shown) > 60
    assert [action.option_strings for action in shown if not named & set(action.option_strings)] == []


def test_a_block_is_read_and_every_one_of_its_name_replaced_and_one_without_a_begin_or_an_end_is_refused():
    begin, end, other = "<!-- x one -->\n", "<!-- end of x one -->", "\n<!-- two -->\n<!-- end of two -->\n"
    text = f"a\n{begin}1\n\n2\n{end}{other}{begin}{end}"
    assert block_names(text, "x ") == ["x one"]
    assert (read_block(text, "x one"), read_block(text, "two")) == ("1\n\n2", "")
    found = f"a\n{begin}new\nlines\n{end}{other}{begin}new\nlines\n{end}"
    for each in (text, found):
        assert replace_blocks(each, "x one", "new\nlines") == found
    begin, end = "<!-- x -->", "<!-- end of x -->"
    for bad in ("", begin, f"{end}\n{begin}", f"{begin}\n{begin}\n{end}", f"a {begin} b"):
        refused(f"expected a line {begin}", replace_blocks, bad, "x", "new")


def test_each_document_has_the_block_that_a_script_writes():
    tables = (("foreign-files.md", "damage"), ("lab/agreement.md", "parity"), ("lab/agreement.md", "layouts"))
    assert all("|\n| --- | ---" in written_table(*table) for table in tables)


if __name__ == "__main__":
    print("\n\n".join(tables()))
