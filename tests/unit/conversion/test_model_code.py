"""The code of an exported folder: it runs where megatron_ddrp cannot be imported, a plug-in's encoding included."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import ENCODINGS, encoding_class, load_plugin
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.from_huggingface import load_hugging_face
from megatron_ddrp.conversion.layers_ddrp import EncoderLayer
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.positions import PositionTerms
from tests.unit.conversion.conftest import READERS, ours, padded_pair_batch, write_checkpoint

ELSEWHERE = """
import json, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
class NotInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("megatron_ddrp", "deepspeed")
        return None if hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, NotInstalled]
import torch
try:
    import megatron_ddrp
except ModuleNotFoundError:
    pass
else:
    sys.exit("megatron_ddrp should not be found")
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


def export_with_expected(folder, tokenizer, **settings):
    """Export a model of these settings, with what it computes in expected.pt; return the folder."""
    load = write_checkpoint(folder / "run", tokenizer, **settings)
    export_checkpoint(load, folder / "hf")
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    states, logits = ours(load_model(load)[0], ids, segments, mask)
    torch.save((ids, segments, mask, states[-1], logits), folder / "hf" / "expected.pt")
    return folder / "hf"


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
    """Code → the plug-in of that code, registered until the test ends."""
    encodings = dict(ENCODINGS)

    def register(code):
        path = tmp_path / "my-plugin.py"
        path.write_text(code)
        load_plugin(path)
        return path

    yield register
    for table in (ENCODINGS, PLUGINS):
        for name in set(table) - set(encodings):
            del table[name]


def test_every_encoding_runs_where_this_package_cannot_be_imported(tmp_path, tokenizer, offline, plugin):
    """In one process, from folders of one name, which transformers does not tell apart by itself."""
    plugin(PLUGIN)
    cases = [(encoding, table) for encoding in ENCODINGS for table in ("shared", "per-layer")]
    assert ("slopes", "per-layer") in cases
    folders = [
        export_with_expected(
            tmp_path / f"{encoding}-{table}", tokenizer, position_encoding=encoding, relative_table=table
        )
        for encoding, table in cases
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", ELSEWHERE, *map(str, folders)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    gaps = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {case: gap for case, gap in gaps.items() if not max(gap) < 3e-6} == {}


@pytest.mark.parametrize("encoding", [*ENCODINGS, "slopes"])
def test_our_own_readers_take_every_encoding_and_a_plugin_that_is_named(tmp_path, tokenizer, offline, plugin, encoding):
    plugin(PLUGIN)
    folder = export_with_expected(tmp_path, tokenizer, position_encoding=encoding, relative_table="per-layer")
    READERS["glue"](folder)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    models = load_hugging_face(folder)[0], load_model(tmp_path / "run")[0]
    states = [ours(model, ids, segments, mask)[0] for model in models]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_local_layers_and_the_thetas_of_rotations_travel(tmp_path, tokenizer, offline):
    from transformers import AutoModel

    settings = {"rope_theta": 50.0, "local_rope_theta": 3.0, "local_attention": 6, "global_every": 2}
    folder = export_with_expected(tmp_path, tokenizer, position_encoding="rope", **settings)
    config = load_hugging_face(folder)[0].config
    assert settings == {name: getattr(config, name) for name in settings}
    ids, segments, mask, expected, _ = torch.load(folder / "expected.pt")
    exported = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        found = exported(input_ids=ids, attention_mask=mask, token_type_ids=segments)[0]
    assert (found - expected)[mask.bool()].abs().max() < 3e-6 * expected.abs().max()
    assert all(layer.layer_position.local_theta == 3.0 for layer in exported.layers)


def test_the_command_is_told_the_plugin(tmp_path, tokenizer, offline, plugin, monkeypatch, capsys):
    from megatron_ddrp.commands.convert import main

    path = plugin(PLUGIN)
    load = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="slopes")
    del PLUGINS[ENCODINGS.pop("slopes")]
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its handlers
    command = ["convert_checkpoint.py", "--load", str(load), "--output", str(tmp_path / "hf")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(UserError, match="'slopes' positions.*--plugin FILE.py"):
        main()
    monkeypatch.setattr(sys, "argv", [*command, "--plugin", str(path)])
    main()
    assert "checked:     loaded by DdrpForMaskedLM; its hidden states differ by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "import torch\n",
            "import torch\nimport megatron_ddrp.model.bert\n",
            r"my-plugin.py imports megatron_ddrp.model.b",
        ),
        (
            "import torch\n",
            "import torch\nfrom megatron_ddrp import errors\n",
            r"my-plugin.py imports megatron_ddrp, so",
        ),
        ("config.relative_distance", "(config.attention_dropout, config.relative_distance)[1]", "'attention_dropout'"),
        ("torch.full((), 0.5)", "torch.rand(())", "exported model's hidden states differ from the checkpoint's"),
    ],
    ids=["import", "from", "setting", "random"],
)
def test_a_plugin_whose_folder_would_not_work_leaves_none(tmp_path, tokenizer, offline, plugin, before, after, words):
    plugin(PLUGIN.replace(before, after))
    load = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="slopes")
    with pytest.raises(UserError, match=words):
        export_checkpoint(load, tmp_path / "hf")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hf") and path.name != "hf_modules"]


WEIGHTS = {
    "bert-r": {"encoder.embeddings.position.relative"},
    "ddrp": {"encoder.embeddings.position.direction", "encoder.embeddings.position.distance"},
    "deberta": {
        "encoder.embeddings.position.relative",
        "encoder.layers.0.layer_position.key.weight",
        "encoder.layers.0.layer_position.query.bias",
        "encoder.layers.0.layer_position.query.weight",
    },
    "tupe-r": {
        f"encoder.embeddings.position.{name}"
        for name in (
            "key.bias",
            "key.weight",
            "norm.bias",
            "norm.weight",
            "query.bias",
            "query.weight",
            "relative",
            "table",
        )
    },
}
"""Weights of the positions in folders of all versions."""


@pytest.mark.parametrize("encoding", WEIGHTS)
def test_a_folder_of_an_older_version_is_read(tmp_path, tokenizer, offline, encoding):
    """It has other code in it, which we do not run, lacks some settings, and names its weights as today."""
    load = write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding, num_layers=1, deberta_emd=False)
    folder = tmp_path / "hf"
    weights = export_checkpoint(load, folder).weights
    assert {name for name in weights if "position" in name} == WEIGHTS[encoding]
    for path in folder.glob("*.py"):
        path.unlink()
    (folder / "export_sums.json").unlink()
    (folder / "modeling_positions.py").write_text("raise AssertionError")
    values = json.loads((folder / "config.json").read_text())
    del values["direction_init"]
    (folder / "config.json").write_text(json.dumps(values))
    READERS["glue"](folder)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    (states, _), (again, _) = (
        ours(model, ids, segments, mask) for model in (load_model(load)[0], load_hugging_face(folder)[0])
    )
    assert torch.equal(states[-1], again[-1])


def test_every_position_term_acts_as_its_formula_says(offline):
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
    for field in dataclasses.fields(PositionTerms):  # a field that is new in the contract must act here, too
        if field.name == "biases_compared":  # HCD's, which belongs to training
            continue
        changed = dataclasses.replace(terms, **changes.get(field.name, {field.name: None}))
        other = attention_logits(query, key, changed)
        assert not torch.equal(other, logits), field.name


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_torch_export_takes_the_model(offline, encoding):
    from megatron_ddrp.conversion.modeling_ddrp import DdrpConfig, DdrpModel

    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    model = DdrpModel(DdrpConfig(position_encoding=encoding, relative_distance=4, **sizes)).eval()
    ids = torch.arange(20).view(2, 10)
    any_size = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=any_size).module()
        for size in (2, 7), (3, 5):
            ids = torch.arange(size[0] * size[1]).view(size) % 20
            found, expected = (run(ids).last_hidden_state for run in (program, model))
            torch.testing.assert_close(found, expected)


def test_each_dropout_of_an_exported_layer_has_its_own_rate(offline):
    config = DdrpConfig(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    layer = EncoderLayer(config, encoding_class(config.position_encoding), 0)
    assert (layer.dropout.p, layer.attention.dropout.p) == (0.3, 0.2)
