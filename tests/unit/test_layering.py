"""The folders are the architecture: who may import what, read from the syntax tree, lazy imports included."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp.config import ENCODINGS, OBJECTIVES
from tests.sources import Trees

PACKAGE = Path(__file__).parents[2] / "megatron_ddrp"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = Trees({file.relative_to(PACKAGE).as_posix(): file for file in FILES})


def imported(tree):
    """Dotted names of all that a module imports, `from a import b` as `a.b`, and uses as `torch.distributed`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            names.add("torch.distributed")
    return names


def importers(*prefixes):
    """Files that import one of `prefixes` or something inside it."""
    return {
        file
        for file, tree in TREES.items()
        if any(name == prefix or name.startswith(prefix + ".") for name in imported(tree) for prefix in prefixes)
    }


def inside(*folders):
    return {file for file in TREES if file.startswith(folders)}


def test_the_reader_sees_what_it_should():
    assert len(FILES) > 30
    source = (
        "import torch.nn\ndef f():\n    from torch import distributed\n    import a.b as c\n    torch.distributed.x()"
    )
    assert imported(ast.parse(source)) == {"torch.nn", "torch.distributed", "a.b"}
    assert importers("torch") >= {"model/bert.py", "model/positions/tables.py"}


def named_outside(names, *folders):
    """(file, text) of every text in the code that is one of `names`, outside of some folders."""
    return {
        (file, node.value)
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
        if not file.startswith(folders)
    }


def test_no_encodings_name_outside_its_file_and_the_configuration():
    """Exceptions: conversion says which encodings another format can hold; a comparison names the paper's models."""
    assert named_outside(ENCODINGS, "config/", "model/positions/", "conversion/", "tasks/", "lab/") == set()


def test_no_objectives_name_where_it_could_decide_something():
    """Exceptions: the model built without an objective is a masked LM; a comparison names the paper's."""
    offenders = named_outside(OBJECTIVES, "config/", "objectives/", "conversion/", "tasks/", "lab/")
    assert offenders == {("model/bert.py", "mlm")}


def test_torch_distributed_only_in_parallel():
    assert importers("torch.distributed") - inside("parallel/") == set()
    assert importers("torch.distributed")


def test_deepspeed_only_in_the_engine():
    assert importers("deepspeed") - inside("engine/") == set()
    assert importers("deepspeed")


def test_the_data_package_imports_no_torch():
    assert importers("torch") & inside("data/") == set()


def test_the_model_knows_one_device_and_no_files():
    allowed = {"config", "model", "data.batches.batch", "errors"}
    for file in inside("model/"):
        own = {n.removeprefix("megatron_ddrp.") for n in imported(TREES[file]) if n.startswith("megatron_ddrp")}
        assert all(any(n == a or n.startswith(a + ".") for a in allowed) for n in own), (file, own)
    forbidden = importers("deepspeed", "torch.distributed", "megatron_ddrp.parallel", "megatron_ddrp.engine")
    assert forbidden & inside("model/", "objectives/", "data/") == set()


def test_encoders_know_no_trainer_and_no_jobs():
    allowed = ("checkpoint", "config", "conversion", "data", "encoders", "errors", "foreign", "model")
    for file in inside("encoders/"):
        own = {n.split(".")[1] for n in imported(TREES[file]) if n.startswith("megatron_ddrp.")}
        assert own <= {*allowed, "load_encoder"}, file


def test_data_flows_one_way():
    assert importers("megatron_ddrp.model", "megatron_ddrp.objectives") & inside("data/") == set()
    assert importers("megatron_ddrp.engine", "megatron_ddrp.train") & inside("data/", "model/", "parallel/") == set()


def test_two_walls():
    """Core, then tasks (evaluation), then lab (experiments): each imports what stands before it.

    The table of commands and the registry name the upper two as strings, which are read when somebody asks for them.
    """
    assert importers("megatron_ddrp.lab") - inside("lab/") == set()
    assert importers("megatron_ddrp.tasks") - inside("tasks/", "lab/") == set()
    assert importers("megatron_ddrp.tasks") & inside("lab/")


def test_no_circle_of_imports_between_folders():
    """Loose files count as folders, except `__init__` and `__main__`, which only pass on to what a user asks for."""
    folders = {name: Path(name).parts[0].removesuffix(".py") for name in TREES}
    graph = {folder: set() for folder in folders.values() if not folder.startswith("__")}
    for file in TREES:
        names = {name.split(".")[1] for name in imported(TREES[file]) if name.startswith("megatron_ddrp.")}
        if folders[file] in graph:
            graph[folders[file]] |= names & graph.keys() - {folders[file]}
    assert graph["tasks"] >= {"conversion", "pages"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the folders of a circle


def test_no_global_state_and_no_global_args():
    for file, tree in TREES.items():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), file
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            assert "args" not in {target.id.lower() for target in targets if isinstance(target, ast.Name)}, file


def test_no_module_of_odds_and_ends():
    assert not [file for file in TREES if file.endswith(("utils.py", "helpers.py", "common.py", "misc.py"))]


@pytest.mark.parametrize(
    "module",
    [
        "megatron_ddrp.config.registry",
        "megatron_ddrp.arguments",
        "megatron_ddrp.commands.dataset",
        "megatron_ddrp.commands.preprocess",
        "megatron_ddrp.tasks.finetune.command",
        "megatron_ddrp.lab.compare.command",
        "megatron_ddrp.data.batches.loader",
        "megatron_ddrp.run.metrics",
    ],
)
def test_light_modules_start_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=60).returncode == 0
