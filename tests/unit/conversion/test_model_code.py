"""The code of an exported folder runs where megatron_ddrp cannot be imported, with plug-ins and heads to fine-tune."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import ENCODINGS, encoding_class, load_plugin
from megatron_ddrp.config.registry import plugins_forgotten_after
from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.families import HEADS
from megatron_ddrp.conversion.from_huggingface import load_hugging_face
from megatron_ddrp.conversion.layers_ddrp import EncoderLayer
from megatron_ddrp.conversion.model_code import HEAD_FORMS
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.model.positions import PositionTerms
from tests.refusals import refused
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import READERS, encoded, ours, padded_pair_batch, write_checkpoint

pytestmark = pytest.mark.usefixtures("few_probes")

ELSEWHERE = """
import json, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlib.util import find_spec
class NotInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("megatron_ddrp", "deepspeed")
        return None if hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, NotInstalled]
assert find_spec("megatron_ddrp") is None
import torch
from transformers import AutoModel, AutoModelForMaskedLM
for folder in sys.argv[1:]:
    ids, segments, mask, hidden, logits = torch.load(folder + "/expected.pt")
    gaps = []
    for auto_class, expected in ((AutoModel, hidden), (AutoModelForMaskedLM, logits)):
        model = auto_class.from_pretrained(folder, trust_remote_code=True).eval()
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=mask, token_type_ids=segments)[0]
        gaps.append(((found - expected)[mask.bool()].abs().max() / expected.abs().max()).item())
    print(json.dumps(gaps))
"""
"""Loads each folder that is named as users do and prints how far it is from what expected.pt says."""


@pytest.fixture(scope="module")
def with_expected(tmp_path_factory):
    """Encoding → an export with what its model computes in expected.pt, which no test changes; made once."""

    @functools.cache
    def make(encoding):
        place = tmp_path_factory.mktemp(encoding)
        tokenizer = conftest.tokenizer_in(place)
        settings = {"position_encoding": encoding, "relative_table": "per-layer"}
        load = write_checkpoint(place / "run", tokenizer, **settings)
        export_checkpoint(load, place / "hf")
        batch = padded_pair_batch(tokenizer.vocab_size)
        states, logits = ours(load_model(load)[0], *batch)
        torch.save((*batch, states[-1], logits), place / "hf" / "expected.pt")
        return place / "hf"

    return make


PLUGIN = '''
"""Text that looks like code stays text:
    from megatron_ddrp.objectives.contract import Objective
"""
import torch

from megatron_ddrp.model.positions import LayerPositions, PositionEncoding, PositionTerms
from megatron_ddrp.model.positions.tables import (
    BertR,
)


class Squash(LayerPositions):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("unsaved", torch.full((), 0.5), persistent=False)

    def forward(self, tensors):
        table, bias = tensors
        return table.tanh(), bias * self.unsaved


class Slopes(BertR):
    layer_part = Squash

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("saved", torch.rand(config.num_attention_heads))

    def forward(self, position_ids):
        distance = (position_ids[:, :, None] - position_ids[:, None, :]).abs()
        return *super().forward(position_ids), -self.saved[:, None, None] * distance[:, None]

    @staticmethod
    def terms(config, tensors):
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, tensors[0], bias=tensors[1], lowest=-reach, highest=reach - 1)


ENCODINGS = {"slopes": Slopes}
'''


@pytest.fixture
def plugin(tmp_path):
    """Function that registers the plug-in of some code until the test ends."""

    def register(code):
        path = tmp_path / "my-plugin.py"
        path.write_text(code)
        load_plugin(path)

    with plugins_forgotten_after():
        yield register


def test_every_encoding_runs_where_this_package_cannot_be_imported(tmp_path, with_expected, offline, plugin):
    """In one process, from folders of one name, which transformers does not tell apart by itself."""
    plugin(PLUGIN)
    assert "slopes" in ENCODINGS
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", ELSEWHERE, *(str(with_expected(encoding)) for encoding in ENCODINGS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    gaps = dict(zip(ENCODINGS, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {encoding: gap for encoding, gap in gaps.items() if not max(gap) < 3e-6} == {}


@pytest.mark.parametrize("encoding", [*ENCODINGS, "slopes"])
def test_our_own_readers_take_every_encoding_and_a_plugin_that_is_named(with_expected, offline, plugin, encoding):
    plugin(PLUGIN)
    folder = with_expected(encoding)
    READERS["glue"](folder)
    models = load_hugging_face(folder)[0], load_model(folder.parent / "run")[0]
    states = [encoded(model, *padded_pair_batch(model.config.vocab_size)) for model in models]
    assert torch.equal(*states)


WRONG = {
    "import": ("import torch\n", "import torch\nimport megatron_ddrp.model.bert\n", "imports megatron_ddrp.m"),
    "from": ("import torch\n", "import torch\nfrom megatron_ddrp import errors\n", "plugin.py imports megatron_ddrp, "),
    "set": ("config.relative_distance", "(config.attention_dropout, config.relative_distance)[1]", "'attention_drop"),
    "random": ("torch.full((), 0.5)", "torch.rand(())", "exported model's hidden states differ from the checkpoint's"),
}


@pytest.mark.parametrize(("before", "after", "words"), WRONG.values(), ids=WRONG)
def test_a_plugin_whose_folder_would_not_work_leaves_none(tmp_path, tokenizer, offline, plugin, before, after, words):
    plugin(PLUGIN.replace(before, after))
    load = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="slopes")
    refused(words, export_checkpoint, load, tmp_path / "hf")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hf") and path.name != "hf_modules"]


def test_a_folder_of_an_older_version_is_read(made_exports, export_of, offline):
    """It has other code in it, which we do not run, and lacks a setting."""
    folder = export_of("ddrp")
    for path in [*folder.glob("*.py"), folder / "export_sums.json"]:
        path.unlink()
    (folder / "modeling_positions.py").write_text("raise AssertionError")
    settings = json.loads((folder / "config.json").read_text())
    del settings["direction_init"]
    (folder / "config.json").write_text(json.dumps(settings))
    READERS["glue"](folder)
    models = load_hugging_face(folder)[0], load_model(made_exports("ddrp") / "run")[0]
    states = [encoded(model, *padded_pair_batch(model.config.vocab_size)) for model in models]
    assert torch.equal(*states)


def test_every_position_term_and_dropout_acts_as_its_formula_says(offline):
    from megatron_ddrp.conversion.layers_ddrp import attention_logits

    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 3, 6, 5, dtype=torch.float64)  # [batch, heads, seq, head_dim] each
    tables, bias, offset_bias = torch.randn(2, 3, 4, 5).double(), torch.randn(1, 3, 6, 6), torch.randn(3, 4)
    terms = PositionTerms(0.3, *tables, bias=bias, lowest=-1, highest=2, offset_bias=offset_bias)
    logits = attention_logits(query, key, terms)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, logits.shape)).tolist():
        r = min(max(i - j, -1), 2) + 1
        products = query[b, h, i] @ (key[b, h, j] + tables[0, h, r]) + key[b, h, j] @ tables[1, h, r]
        torch.testing.assert_close(logits[b, h, i, j], products * 0.3 + bias[0, h, i, j] + offset_bias[h, r])
    changes = {"scale": {"scale": 0.4}, "lowest": {"lowest": 0, "highest": 3}, "highest": {"lowest": -2, "highest": 1}}
    changes["table_row"] = {"table_row": torch.tensor([0, 1, 1, 3])}
    names = {field.name for field in dataclasses.fields(PositionTerms)}  # a new one must act here, too
    for name in names - {"biases_compared"}:  # HCD's, which belongs to training
        changed = dataclasses.replace(terms, **changes.get(name, {name: None}))
        assert not torch.equal(attention_logits(query, key, changed), logits), name
    config = DdrpConfig(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    layer = EncoderLayer(config, encoding_class(config.position_encoding), 0)
    assert (layer.dropout.p, layer.attention.dropout.p) == (0.3, 0.2)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_torch_export_takes_the_model(offline, encoding):
    from megatron_ddrp.conversion.modeling_ddrp import DdrpConfig, DdrpModel

    sizes = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}
    model = DdrpModel(DdrpConfig(position_encoding=encoding, relative_distance=4, num_hidden_layers=1, **sizes)).eval()
    ids = torch.arange(20).view(2, 10)
    any_size = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=any_size).module()
        for size in (2, 7), (3, 5):
            ids = torch.arange(size[0] * size[1]).view(size) % 20
            found, expected = (run(ids).last_hidden_state for run in (program, model))
            torch.testing.assert_close(found, expected)


FINE_TUNED = dict(zip(("sequence", "tokens", "qa"), (form.name for form in HEAD_FORMS), strict=True))
NEW = {"tokens": {"classifier.weight", "classifier.bias"}, "qa": {"qa_outputs.weight", "qa_outputs.bias"}}
NEW["sequence"] = NEW["tokens"] | {"pooler.dense.weight", "pooler.dense.bias"}
"""Kind of a head → names of its weights."""


def auto_class(kind):
    import transformers

    return getattr(transformers, f"AutoModelFor{FINE_TUNED[kind]}")


@pytest.fixture
def folders(tmp_path, made_exports, export_of, offline):
    """One BERT of ours as two exports: with our own code, and as transformers' own class."""
    run = made_exports("absolute") / "run"
    own = export_checkpoint(run, tmp_path / "own", family_name="megatron_ddrp").output
    return SimpleNamespace(own=own, bert=export_of("absolute"))


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_a_masked_lm_loads_under_a_new_head_and_says_so(folders, kind):
    options = {"num_labels": 100, "classifier_dropout": 0.5} if kind != "qa" else {}
    conftest.change_json(folders.own / "config.json", initializer_range=0.5)
    options |= {"trust_remote_code": True, "output_loading_info": True}
    model, report = auto_class(kind).from_pretrained(folders.own, **options)
    assert type(model).__name__ == f"DdrpFor{FINE_TUNED[kind]}" and set(report["missing_keys"]) == NEW[kind]
    assert all(name.startswith("head.") for name in report["unexpected_keys"]) and report["unexpected_keys"]
    weights = dict(model.named_parameters())
    assert not any(weights[name].any() for name in NEW[kind] if name.endswith("bias"))
    drawn = torch.cat([weights[name].flatten() for name in sorted(NEW[kind]) if name.endswith("weight")])
    assert drawn.std().item() == pytest.approx(0.5, rel=0.3)
    if kind != "qa":
        assert model.dropout.p == 0.5
        assert auto_class(kind).from_pretrained(folders.own, trust_remote_code=True).dropout.p == 0.1


TOKENS = torch.where(torch.arange(24) % 5 == 0, -100, torch.arange(24) % 3).repeat(3, 1)
LABELS = {
    "classes": ("sequence", {"num_labels": 3}, {"labels": torch.tensor([0, 2, 1])}),
    "number": ("sequence", {"num_labels": 1}, {"labels": torch.tensor([0.5, 2.0, 5.0])}),
    "numbers": ("sequence", {"num_labels": 3, "problem_type": "regression"}, {"labels": torch.rand(3, 3)}),
    "several": ("sequence", {"num_labels": 3}, {"labels": torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 1]])}),
    "tokens": ("tokens", {"num_labels": 3}, {"labels": TOKENS}),
    "spans": ("qa", {}, {"start_positions": torch.tensor([1, 4, 30]), "end_positions": torch.tensor([3, 24, 1])}),
    "column": ("qa", {}, {"start_positions": torch.tensor([[1], [4], [0]]), "end_positions": torch.ones(3, 1).long()}),
}
"""What is labelled → kind of head, settings, and the labels of three rows of 24 tokens."""


@pytest.mark.parametrize("case", LABELS)
def test_losses_and_gradients_are_those_of_transformers(folders, tokenizer, case):
    kind, options, labels = LABELS[case]
    ours = auto_class(kind).from_pretrained(folders.own, trust_remote_code=True, **options).eval()
    theirs = auto_class(kind).from_pretrained(folders.bert, **options).eval()
    heads = {name: tensor.detach() * 20 for name, tensor in ours.named_parameters() if name in NEW[kind]}
    ours.load_state_dict(heads, strict=False)
    theirs.load_state_dict({name.replace("pooler", "bert.pooler"): w for name, w in heads.items()}, strict=False)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    outputs = [model(input_ids=ids, attention_mask=mask, token_type_ids=segments, **labels) for model in (ours, theirs)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    assert ours.config.problem_type == theirs.config.problem_type
    for model, output in zip((ours, theirs), outputs, strict=True):
        output.loss.backward()
        assert list(output)[0] == "loss" and isinstance(output.to_tuple(), tuple), model
    last = "qa_outputs" if kind == "qa" else "classifier"
    torch.testing.assert_close(getattr(ours, last).weight.grad, getattr(theirs, last).weight.grad)
    other = ours(ids, mask, segments, **{name: values * 0 for name, values in labels.items()}).loss
    assert not torch.allclose(other, outputs[0].loss), "the labels act"


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_every_kind_trains_under_the_trainer_and_is_saved_whole(tmp_path, tokenizer, export_of, offline, kind):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import AutoModel, Trainer, TrainingArguments

    model = auto_class(kind).from_pretrained(export_of("ddrp"), trust_remote_code=True)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    labels = {"sequence": {"labels": [1, 0, 1]}, "tokens": {"labels": (ids % 2).tolist()}}
    labels = labels.get(kind, {"start_positions": [1, 4, 0], "end_positions": [3, 12, 1]})
    columns = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "unread": [0, 0, 0], **labels}
    rows = [{name: values[row] for name, values in columns.items()} for row in range(3)]
    settings = {"per_device_train_batch_size": 3, "learning_rate": 1e-2, "max_steps": 6, "save_strategy": "no"}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    trainer.save_model(tmp_path / "saved")
    again = auto_class(kind).from_pretrained(tmp_path / "saved", trust_remote_code=True)
    encoder = AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    for first, second in ((model, again), (encoder, model.encoder)):
        assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("encoding", ["ddrp", "rope"])
def test_the_code_suits_older_versions_of_transformers(export_of, offline, encoding):
    """They copy only direct imports of a local folder, and save only the code of registered classes."""
    from transformers.dynamic_module_utils import get_relative_imports

    code = export_of(encoding) / "modeling_ddrp.py"
    assert set(get_relative_imports(code)) == {path.stem for path in code.parent.glob("*.py")} - {code.stem}
    expected = {f"DdrpFor{name}": f"AutoModelFor{name}" for name in FINE_TUNED.values()}
    expected |= {f"DdrpFor{head.name}": f"AutoModelFor{head.auto}" for head in HEADS.values()}
    registered = re.findall(r"^(\w+)\.register_for_auto_class\(\"(\w+)\"\)$", code.read_text(), re.MULTILINE)
    assert dict(registered) == expected | {"DdrpModel": "AutoModel"}
