"""`--plugin FILE.py`: all kinds from outside of the package, among them the files of docs/plugins.md; each is one file,
and nothing else had to be touched for it.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp import finetune, pretrain, report
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import PLUGINS, TABLES, plugins_forgotten_after
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.run.metrics import read_rows
from tests.conftest import TinyCorpus
from tests.integration.conftest import TINY, Flags
from tests.integration.launch import ROOT, Result, run_command, start_ranks
from tests.integration.test_functions import hashes
from tests.refusals import refused, wrong_arguments

FILES = [Path(__file__).with_name(name) for name in ("plugin_encoding.py", "plugin_objective.py")]
NAMES = ["--position-encoding", "slopes", "--objective", "counting", "--objective-options", "weight=0.7"]
VALIDATION = {"eval_interval": 5, "eval_iters": 1, "save_interval": 5}


@pytest.fixture
def plugins(tmp_path: Path) -> list[str]:
    """The flags that load both files, from a folder of the user's."""
    words = []
    for file in FILES:
        own = tmp_path / f"my_{file.name}"
        own.write_bytes(file.read_bytes())
        words.append(str(own))
    return ["--plugin", *words]


def convert(run: Path, output: Path, *words: str) -> Result:
    return start_ranks(["--load", run, "--output", output, *words], None, program="tools/convert_checkpoint.py")


LOADS = """
import json, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron_ddrp":
            raise ImportError("an exported folder stands alone")
sys.meta_path.insert(0, Nothing())
import torch
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(5, 25).view(2, 10)
with torch.no_grad():
    print(json.dumps(model(input_ids=ids, output_hidden_states=True).hidden_states[-1].tolist()))
"""


@pytest.mark.slow
def test_it_trains_alike_in_every_layout_is_recorded_exported_and_loaded_alone(
    flags: Flags, plugins: list[str], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    start_ranks([*plugins, *flags(save=one, **VALIDATION), *NAMES]).check()
    start_ranks([*plugins, *flags(save=two, tensor_model_parallel_size=2, **VALIDATION), *NAMES], world_size=2).check()
    rows = read_rows(one)
    for row, other in zip(rows, read_rows(two), strict=True):
        for name in {"loss", "lm_loss", "count_loss", "grad_norm", "valid_count_loss"} & row.keys():
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    first = rows[0]
    assert first["loss"] == pytest.approx(first["lm_loss"] + 0.7 * first["count_loss"]) and first["mean_length"] > 2
    assert rows[-1]["valid_count_loss"] > 0
    assert {path.name for path in (one / "plugins").iterdir()} == {"my_plugin_encoding.py", "my_plugin_objective.py"}

    without = convert(one, tmp_path / "huggingface")
    (line,) = without.stderr[0].splitlines()
    assert without.exit_codes == [2] and "--plugin" in line and "damaged" not in line
    changed = Path(plugins[1])
    changed.write_text(changed.read_text() + "# another line\n")
    again = start_ranks([*plugins, *flags(save=one, load=one, train_iters=6, **VALIDATION), *NAMES]).check()
    told = "--plugin my_plugin_encoding.py: changed since the run began; its new code is kept as plugins/"
    assert told + "my_plugin_encoding-2.py" in again.stdout[0] and len(list((one / "plugins").iterdir())) == 3
    forgotten = start_ranks(flags(save=one, load=one, train_iters=9, **VALIDATION))
    assert forgotten.exit_codes == [2] and "--plugin" in forgotten.stderr[0] and "damaged" not in forgotten.stderr[0]
    for words, told in (((), "unknown: "), (plugins, "slopes + counting")):
        report = ["--load", one, "--output-dir", tmp_path / "report", *words]
        start_ranks(report, None, program="tools/training_report.py").check()
        assert told in (tmp_path / "report" / "report.md").read_text()
    convert(one, tmp_path / "huggingface", *plugins).check()
    loaded = run_command([sys.executable, "-c", LOADS, tmp_path / "huggingface"])
    assert loaded.returncode == 0, loaded.stderr
    theirs = torch.tensor(json.loads(loaded.stdout.splitlines()[-1]))
    ours = run_encode(one, plugins)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def run_encode(run: Path, plugins: list[str]) -> torch.Tensor:
    """Return the last hidden states of a checkpoint."""
    ids = torch.arange(5, 25).view(2, 10)
    with plugins_forgotten_after():
        for file in plugins[1:]:
            load_plugin(Path(file))
        model, _, _ = load_model(run)
        return model.eval().encode(ids, ids * 0, ids * 0 + 1, torch.arange(10).expand(2, -1))


Settings = dict[str, Any]


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
    data = {"data_path": tiny_corpus.prefix, "vocab_file": tiny_corpus.vocab_file}
    plugins = {"plugin": [str(page / file) for file in files]}
    return TINY | data | chosen | plugins | {"train_iters": 4, "lr_warmup_fraction": 0.25, "zero_stage": 1}


def test_a_run_with_all_of_them_resumes_bit_for_bit_and_the_process_forgets_them(
    settings: Settings, tmp_path: Path
) -> None:
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


def lion(parameters: list[float], gradients: list[float], momenta: list[float], rate: float, decay: float) -> None:
    """Algorithm 2 of Chen et al. (arXiv:2302.06675), with β1 = 0.9 and β2 = 0.99; changes parameters and momenta."""
    for number, gradient in enumerate(gradients):
        update = 0.9 * momenta[number] + 0.1 * gradient
        sign = (update > 0) - (update < 0)
        parameters[number] -= rate * (sign + decay * parameters[number])
        momenta[number] = 0.99 * momenta[number] + 0.01 * gradient


def load(file: Path, table: str) -> dict[str, Any]:
    """The dictionary of a file of the page, without the registry."""
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    return names[table]


def test_the_optimizer_is_its_algorithm(page: Path) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = load(page / "lion.py", "OPTIMIZERS")["lion"](groups, 0.01, 0.9, 0.99)
    parameters, momenta = weight.tolist(), [0.0] * 3
    for gradients in ([1.0, -0.1, 0.0], [-2.0, -0.1, 0.3], [0.01, 5.0, -9.0]):
        weight.grad = torch.tensor(gradients, dtype=torch.float64)
        optimizer.step()
        lion(parameters, gradients, momenta, 0.01, 0.1)
        assert weight.tolist() == pytest.approx(parameters, rel=1e-14)
    optimizer.found_inf = torch.ones(())
    weight.grad.fill_(math.nan)
    optimizer.step()
    assert weight.tolist() == pytest.approx(parameters, rel=1e-14)


def test_spans_are_words_in_a_row_that_are_replaced_alike(settings: Settings) -> None:
    from megatron_ddrp.arguments import parse_arguments
    from megatron_ddrp.commands.functions import given_words
    from megatron_ddrp.config.registry import plugins_forgotten_after

    with plugins_forgotten_after():
        words = given_words(settings | {"mask_prob": 0.4, "global_batch_size": 32, "micro_batch_size": 32})
        corpus = Corpus.open(parse_arguments(words).config)
        loader = corpus.loader("train", 0, 1)
        batches = [batch for step in range(8) for batch in loader.step(32 * step)]
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


def write_table(path: Path, rows: int, labels: int) -> Path:
    lines = [json.dumps({"text": f"word {'good ' * (row % labels)}", "label": row % labels}) for row in range(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def encoder(tiny_corpus: TinyCorpus, tmp_path: Path) -> Path:
    data = {"data_path": tiny_corpus.prefix, "vocab_file": tiny_corpus.vocab_file}
    return pretrain(**TINY | data | {"train_iters": 1, "save": tmp_path / "run"}).path  # type: ignore[return-value]


def test_a_metric_and_a_kind_of_task_in_fine_tuning(encoder: Path, page: Path, tmp_path: Path) -> None:
    from sklearn.metrics import cohen_kappa_score

    files = {"train": write_table(tmp_path / "t.jsonl", 24, 3), "valid": write_table(tmp_path / "v.jsonl", 12, 3)}
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


def test_the_median_class_is_predicted(page: Path) -> None:
    outputs = torch.tensor([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2], [0.1, 0.2, 0.7]]).log()
    assert load(page / "ordinal.py", "KINDS")["ordinal"]().predict(outputs).tolist() == [1.0, 0.0, 2.0]


WRONG = {
    "ENCODINGS = {}": "adds nothing",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "class A: pass\nOBJECTIVES = {'mth': A}": "OBJECTIVES names 'mth', which is taken: choose another name",
    "ENCODINGS = {'mine': 3}": "ENCODINGS['mine'] is 3: expected a class derived from PositionEncoding",
    "class A: pass\nOBJECTIVES = {'mine': A}": "expected a class derived from Objective",
    "": "cannot be read: expected a Python file",
    "OPTIMIZERS = {'lion': 3}": "OPTIMIZERS['lion'] is 3: expected a class derived from Optimizer",
    "SCHEDULES = {'fall': 3}": "SCHEDULES['fall'] is 3: expected a function",
    "def f(labels, predictions): return 1\nMETRICS = {'f': f}": "expected a function with an attribute kinds",
    "MASKINGS = {'token': 3}": "MASKINGS names 'token', which is taken",
    "x = 3": "adds nothing: expected one of ENCODINGS, OBJECTIVES, MASKINGS, OPTIMIZERS, ",
}
"""Text of a file, none for a file that is missing, and words of the line."""


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_plug_in_is_refused_in_one_line(code: str, settings: Settings, tmp_path: Path) -> None:
    if code:
        (tmp_path / "wrong.py").write_text(code, encoding="utf-8")
    own = settings | {"plugin": str(tmp_path / "wrong.py")}
    assert "--plugin" in str(wrong_arguments(re.escape(WRONG[code]), pretrain, **own))


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


@pytest.mark.parametrize(
    ("moments", "average", "stage", "message"),
    [
        ("()", "parameter.clone()", 1, "Forgetful.moments is .*, but it keeps average"),
        ("('average',)", "parameter.clone()", 0, "average is missing, more, not 0, or not of the weight's shape"),
        ("('average',)", "torch.zeros(1)", 0, "average is missing, more, not 0, or not of the weight's shape"),
        ("('average',)", "0", 2, "--optimizer forgetful with --zero-stage 2: .*; use --zero-stage 0 or 1"),
    ],
)
def test_an_optimizer_that_a_checkpoint_cannot_hold_is_refused(
    moments: str, average: str, stage: int, message: str, settings: Settings, tmp_path: Path
) -> None:
    code = FORGETFUL.replace("MOMENTS", moments).replace("AVERAGE", average)
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    own = {"plugin": str(tmp_path / "own.py"), "optimizer": "forgetful", "masking": "token", "lr_decay_style": "linear"}
    refused(message, pretrain, **settings | own | {"zero_stage": stage})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(step, warmup, last, config): return float('nan')\nSCHEDULES = {'f': f}", "--lr-decay-style f gave nan"),
        (
            "from megatron_ddrp.data.batches.masking import Masking\nclass M(Masking):\n    longest = 2\n"
            "    def lengths(self, draws, ids, first): return draws\nMASKINGS = {'f': M}",
            "M.lengths gave .*expected a whole number from 1 to 2",
        ),
    ],
)
def test_wrong_values_of_a_plug_in_end_the_run(code: str, message: str, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    name = "lr_decay_style" if "SCHEDULES" in code else "masking"
    plain = {"optimizer": "adamw", "masking": "token", "lr_decay_style": "linear"}
    refused(message, pretrain, **settings | plain | {"plugin": str(tmp_path / "own.py"), name: "f"})


@pytest.mark.slow
def test_it_resumes_on_two_ranks_and_at_another_zero_stage(settings: Settings, tmp_path: Path) -> None:
    from megatron_ddrp.commands.functions import given_words

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
