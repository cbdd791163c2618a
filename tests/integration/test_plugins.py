"""`--plugin FILE.py`: all kinds from outside of the package, among them the files of docs/plugins.md; each is one file,
and nothing else had to be touched for it.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp import convert, finetune, pretrain, report
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands.functions import given_words
from megatron_ddrp.config.registry import PLUGINS, TABLES, plugins_forgotten_after
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.run.metrics import read_rows
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags, Told, Train, tiny_settings
from tests.integration.launch import ROOT, json_file, start_ranks
from tests.integration.test_functions import Settings, hashes
from tests.refusals import refused, wrong_arguments

FILES = [Path(__file__).with_name(name) for name in ("plugin_encoding.py", "plugin_objective.py")]
VALIDATION = {"eval_interval": 5, "eval_iters": 1, "save_interval": 5}


@pytest.mark.slow
def test_it_trains_alike_in_every_layout_is_recorded_and_exported(
    train: Train, told: Told, flags: Flags, tmp_path: Path
) -> None:
    plugins = tuple(tmp_path / f"my_{file.name}" for file in FILES)  # in a folder of the user's
    for file, own in zip(FILES, plugins, strict=True):
        own.write_bytes(file.read_bytes())
    names = {"position_encoding": "slopes", "objective": "counting", "objective_options": ("weight=0.7",)}
    one, two, exported, chosen = tmp_path / "one", tmp_path / "two", tmp_path / "huggingface", {"plugin": plugins}
    rows = train(**chosen, **names, save=one, **VALIDATION).rows
    start_ranks(flags(**chosen, **names, save=two, tensor_model_parallel_size=2, **VALIDATION), world_size=2).check()
    for row, other in zip(rows, read_rows(two), strict=True):
        for name in {"loss", "lm_loss", "count_loss", "grad_norm", "valid_count_loss"} & row.keys():
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    first = rows[0]
    assert first["loss"] == pytest.approx(first["lm_loss"] + 0.7 * first["count_loss"]) and first["mean_length"] > 2
    assert rows[-1]["valid_count_loss"] > 0
    assert {path.name for path in (one / "plugins").iterdir()} == {"my_plugin_encoding.py", "my_plugin_objective.py"}
    assert "damaged" not in str(wrong_arguments("--plugin", convert, load=one, output=exported))
    plugins[0].write_text(plugins[0].read_text() + "# another line\n")
    line = "--plugin my_plugin_encoding.py: changed since the run began; its new code is kept as plugins/"
    again = told(**chosen, **names, save=one, load=one, train_iters=6, **VALIDATION)
    assert line + "my_plugin_encoding-2.py" in again and len(list((one / "plugins").iterdir())) == 3
    forgotten = wrong_arguments("--plugin", train, save=one, load=one, train_iters=9, **VALIDATION)
    assert "damaged" not in str(forgotten)
    for given, words in (({}, "unknown: "), (chosen, "slopes + counting")):
        report(load=one, output_dir=tmp_path / "report", **given)
        assert words in (tmp_path / "report" / "report.md").read_text()
    convert(load=one, output=exported, **chosen)  # tests/unit/conversion/test_model_code.py loads such a folder alone


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("plugins")
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, flags=re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    return folder


@pytest.fixture
def settings(tiny_corpus: TinyCorpus, page: Path) -> Settings:
    files = ["lion.py", "spans.py", "square.py", "norms.py"]
    chosen = {"optimizer": "lion", "masking": "spans", "lr_decay_style": "square", "weight_decay": 0.1, "lr": 1e-3}
    chosen |= {"plugin": [str(page / file) for file in files], "train_iters": 4, "lr_warmup_fraction": 0.25}
    return tiny_settings(tiny_corpus) | chosen | {"zero_stage": 1}


def test_a_run_with_all_of_them_resumes_bit_for_bit_and_they_are_forgotten(settings: Settings, tmp_path: Path) -> None:
    before = [dict(PLUGINS), *map(dict, TABLES.values())]  # type: ignore[call-overload]
    settings |= {"hidden_dropout": 0.1, "save_interval": 2}
    whole = pretrain(**settings, save=tmp_path / "whole")
    own = settings | {"save": tmp_path / "own", "load": tmp_path / "own"}
    pretrain(**own, exit_interval=2)
    resumed = pretrain(**own)
    assert hashes(tmp_path / "own") == hashes(tmp_path / "whole") != {}
    assert resumed.rows[-1]["loss"] == whole.rows[-1]["loss"]
    assert [dict(PLUGINS), *map(dict, TABLES.values())] == before  # type: ignore[call-overload]
    names = {path.name for path in (tmp_path / "own" / "plugins").iterdir()}
    assert names == {"lion.py", "spans.py", "square.py", "norms.py"}
    without = {name: value for name, value in own.items() if name != "plugin"}
    refused("--optimizer.*lion.*--plugin FILE.py", pretrain, **without)


def test_the_schedule_and_the_column_stand_in_the_rows_and_the_report(settings: Settings, tmp_path: Path) -> None:
    run = pretrain(**settings, save=tmp_path / "run")
    assert [row["lr"] for row in run.rows] == pytest.approx([1e-3, 1e-3, 1e-3 * 4 / 9, 1e-3 / 9])
    norms = [row["embedding_norm"] for row in read_rows(tmp_path / "run")]
    assert len(set(norms)) == 4
    text = report(load=run.path, output_dir=tmp_path / "report").read_text(encoding="utf-8")
    assert f"| embedding_norm, training | {norms[0]:.3f} | {norms[-1]:.3f} | 4 |" in text


def load(file: Path, table: str) -> dict[str, Any]:
    """The dictionary of a file of the page, without the registry."""
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    return names[table]


def test_the_optimizer_is_its_algorithm(page: Path) -> None:
    """Algorithm 2 of Chen et al. (arXiv:2302.06675), with β1 = 0.9, β2 = 0.99, a rate of 0.01 and a decay of 0.1."""
    weight = torch.nn.Parameter(torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = load(page / "lion.py", "OPTIMIZERS")["lion"](groups, 0.01, 0.9, 0.99)
    parameters, momenta = np.array(weight.tolist()), np.zeros(3)
    for gradients in ([1.0, -0.1, 0.0], [-2.0, -0.1, 0.3], [0.01, 5.0, -9.0]):
        weight.grad = torch.tensor(gradients, dtype=torch.float64)
        optimizer.step()
        parameters -= 0.01 * (np.sign(0.9 * momenta + 0.1 * weight.grad.numpy()) + 0.1 * parameters)
        momenta = 0.99 * momenta + 0.01 * weight.grad.numpy()
        assert weight.tolist() == pytest.approx(parameters, rel=1e-14)
    optimizer.found_inf = torch.ones(())
    weight.grad.fill_(math.nan)
    optimizer.step()
    assert weight.tolist() == pytest.approx(parameters, rel=1e-14)


def test_spans_are_words_in_a_row_that_are_replaced_alike(settings: Settings) -> None:
    with plugins_forgotten_after():
        words = given_words(settings | {"mask_prob": 0.4, "global_batch_size": 256, "micro_batch_size": 256})
        corpus = Corpus.open(parse_arguments(words).config)
        batches = corpus.loader("train", 0, 1).step(0)
    lengths, mixed = [], 0
    for batch in batches:
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(labels != IGNORED_LABEL)) + 1):
                if labels[run[0]] != IGNORED_LABEL:
                    lengths.append(len(run))
                    masked = ids[run] == corpus.tokenizer.mask_id
                    mixed += 0 < masked.sum() < len(run)
    assert np.mean(np.array(lengths) > 3) > 0.2  # single words of this text have fewer pieces
    assert mixed < 0.2 * len(lengths)  # neighbouring spans may differ; pieces drawn apart would mix half of them


def test_a_metric_and_a_kind_of_task_in_fine_tuning(train: Train, page: Path, tmp_path: Path) -> None:
    from sklearn.metrics import cohen_kappa_score

    table = [{"text": f"word {'good ' * (row % 3)}", "label": row % 3} for row in range(24)]
    parts = {"train": table, "valid": table[:12]}
    files = {name: json_file(tmp_path / f"{name}.jsonl", rows) for name, rows in parts.items()}
    encoder = train(train_iters=1, save=tmp_path / "run").path
    shared = files | {"load": encoder, "seeds": 1, "lr": 1e-3, "epochs": 1, "batch_size": 8}
    scores = finetune(**shared, plugin=str(page / "kappa.py"), metric="kappa", output_dir=tmp_path / "kappa")
    (row,) = scores.rows
    (file,) = (tmp_path / "kappa" / "predictions").glob("*.tsv")
    pairs = [line.split("\t")[-2:] for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    predictions, labels = zip(*(pair for pair in pairs if pair[0].isdigit()), strict=True)
    assert row["score"] == pytest.approx(cohen_kappa_score(labels, predictions), abs=1e-9)
    assert "kappa" in scores.page
    changed = page.with_name("changed-kappa.py")
    changed.write_text((page / "kappa.py").read_text(encoding="utf-8") + "# another line\n", encoding="utf-8")
    plan = finetune(**shared, plugin=str(changed), metric="kappa", output_dir=tmp_path / "kappa")
    assert len(plan.rows) == 2  # what a plug-in computed is not taken for another's
    line = "--metric kappa: --kind classification has accuracy"
    refused(line, finetune, **shared, metric="kappa", output_dir=tmp_path / "kappa")
    kind = {"plugin": str(page / "ordinal.py"), "kind": "ordinal", "metric": "within-one"}
    (row,) = finetune(**shared, **kind, output_dir=tmp_path / "ordinal").rows
    assert row["facts"]["kind"] == "ordinal" and 0 < row["score"] <= 1
    outputs = torch.tensor([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2], [0.1, 0.2, 0.7]]).log()
    median = load(page / "ordinal.py", "KINDS")["ordinal"]().predict(outputs)
    assert median.tolist() == [1.0, 0.0, 2.0], "the median class is predicted"


IDLE = """
from megatron_ddrp.engine.optimizers import Optimizer
class Idle(Optimizer):
    moments = ()
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
OPTIMIZERS = {"idle": Idle}
"""
WRONG = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "class A: pass\nOBJECTIVES = {'mine': A}": "expected a class derived from Objective",
    "": "cannot be read: expected a Python file",
    IDLE.replace("moments", "names"): "expected a class derived from Optimizer with an attribute moments, a list",
    "SCHEDULES = {'fall': 3}": "SCHEDULES['fall'] is 3: expected a function",
    "MASKINGS = {'token': 3}": "MASKINGS names 'token', which is taken: choose another name",
    "x = 3": "adds nothing: expected one of ENCODINGS, OBJECTIVES, MASKINGS, OPTIMIZERS, ",
}
"""Text of a file, none for a file that is missing, and words of the line."""
NAN = "def f(step, warmup, last, config): return float('nan')\nSCHEDULES = {'f': f}"
LONG = """
from megatron_ddrp.data.batches.masking import Masking
class M(Masking):
    longest = 2
    def lengths(self, draws, ids, first): return draws
MASKINGS = {'f': M}
"""
FORGETFUL = """
from megatron_ddrp.engine.optimizers import Optimizer
import torch
class Forgetful(Optimizer):
    moments = MOMENTS
    zero_stages = (0, 1)
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
    def update(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = AVERAGE
OPTIMIZERS = {"forgetful": Forgetful}
"""
NOT_HELD = "average is missing, more, not 0, or not of the weight's shape"


def forgetful(moments: str, average: str, zero_stage: int) -> tuple[str, dict[str, Any]]:
    code = FORGETFUL.replace("MOMENTS", moments).replace("AVERAGE", average)
    return code, {"optimizer": "forgetful", "zero_stage": zero_stage}


def test_a_wrong_plug_in_is_refused_in_one_line(settings: Settings, tmp_path: Path) -> None:
    """It is wrong in what it adds, in what its functions return, or has an optimizer that no checkpoint can hold."""
    for number, (code, line) in enumerate(WRONG.items()):
        if code:
            (tmp_path / f"{number}.py").write_text(code, encoding="utf-8")
        own = settings | {"plugin": str(tmp_path / f"{number}.py")}
        assert "--plugin" in str(wrong_arguments(re.escape(line), pretrain, **own))
    plain = settings | {"optimizer": "adamw", "masking": "token", "lr_decay_style": "linear"}
    for (code, changes), line in (
        ((NAN, {"lr_decay_style": "f"}), "--lr-decay-style f gave nan"),
        ((LONG, {"masking": "f"}), "M.lengths gave .*expected a whole number from 1 to 2"),
        ((IDLE, {"optimizer": "idle"}), "Idle, the class of --optimizer, has no update"),
        (forgetful("()", "parameter.clone()", 1), "Forgetful.moments is .*, but it keeps average"),
        (forgetful("('average',)", "parameter.clone()", 0), NOT_HELD),
        (forgetful("('average',)", "torch.zeros(1)", 0), NOT_HELD),
        (forgetful("('average',)", "0", 2), "--optimizer forgetful with --zero-stage 2: .*; use --zero-stage 0 or 1"),
    ):
        (tmp_path / "own.py").write_text(code, encoding="utf-8")
        refused(line, pretrain, **plain | {"plugin": str(tmp_path / "own.py")} | changes)


OWN_OPTIMIZERS = {
    "plain": """
from megatron_ddrp.config import Number
from megatron_ddrp.engine.optimizers import Optimizer
class Plain(Optimizer):
    moments, options = (), {"decay": Number(0.9, "[0, 1)")}
    def __init__(self, groups, lr, decay):
        super().__init__(groups, {"lr": lr, "decay": decay})
    def update(self):
        for group in self.param_groups:
            assert group["decay"] == 0.9 and group["weight_decay"] in (0.0, 0.01), group
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
OPTIMIZERS = {"plain": Plain}
""",
    "radam": """
import torch
from megatron_ddrp.engine.optimizers import Optimizer
class RAdam(Optimizer, torch.optim.RAdam):
    moments = ("exp_avg", "exp_avg_sq")
    update = torch.optim.RAdam.step
OPTIMIZERS = {"radam": RAdam}
""",
}


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_a_key_of_an_optimizers_own_and_one_of_torch_in_three_lines(name: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_OPTIMIZERS[name], encoding="utf-8")
    rows = train(plugin=tmp_path / "own.py", optimizer=name, weight_decay=0.01, zero_stage=1, train_iters=2).rows
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_it_resumes_on_two_ranks_and_at_another_zero_stage(settings: Settings, tmp_path: Path) -> None:
    settings |= {"save_interval": 2}
    whole = pretrain(**settings, save=tmp_path / "whole").rows
    pretrain(**settings, save=tmp_path / "own", exit_interval=2)
    own = settings | {"save": tmp_path / "own", "load": tmp_path / "own", "zero_stage": 2}
    start_ranks(given_words(own), world_size=2).check()
    resumed = read_rows(tmp_path / "own")
    assert [row["iteration"] for row in resumed] == [1, 2, 3, 4]
    for row, other in zip(whole, resumed, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["embedding_norm"] == pytest.approx(row["embedding_norm"], rel=1e-5)
