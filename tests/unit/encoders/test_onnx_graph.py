"""Graphs in ONNX: equal outputs at every length, the vectors of sentence encoders, and refusals."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch

from megatron_ddrp.commands import convert
from megatron_ddrp.conversion.families.contract import OWN_MODEL_TYPE, SUMS, check_sums
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import FamilyModel
from megatron_ddrp.encoders.onnx_graph import GRAPH, OnnxModel, export_onnx, modules_behind
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import write_checkpoint
from tests.unit.tasks.conftest import WORDS, tokenizer_of, write_bert

transformers = pytest.importorskip("transformers")
for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)
LENGTH = 20
"""Longest row: ln((LENGTH - 1) / 2), which `deberta-v2` divides by, is smaller in float32."""
TYPES = "sentence_transformers.models."
POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 16}


def write_modules(folder, *kinds, pooling=POOLING):
    """Make a folder a sentence encoder with some modules behind its transformer; return it."""
    modules = [
        {"path": f"{n}_{kind}" if n else "", "type": f"{'' if '.' in kind else TYPES}{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def rows(batch, length):
    """Return inputs of rows of `length` down to one piece, with segments, under transformers' names."""
    ids = torch.from_numpy(np.random.default_rng(length).integers(5, 5 + len(WORDS), (batch, length)))
    mask = (torch.arange(length) < torch.linspace(length, 1, batch).long()[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": (torch.arange(length) > 1).long() * mask}


@pytest.mark.parametrize("encoding", ["ddrp", "deberta-v2"])
def test_every_encoding_has_equal_hidden_states_up_to_the_longest_row(tmp_path, encoding):
    """The last distance of `deberta-v2` is where a logarithm that is rounded up would leave the table."""
    tokenizer = tokenizer_of(tmp_path, WORDS)
    settings = {"position_encoding": encoding, "num_layers": 1, "seq_length": LENGTH}
    run = write_checkpoint(tmp_path / "run", tokenizer, "mlm", **settings)
    export_checkpoint(run, tmp_path / "hf", family_name=OWN_MODEL_TYPE)
    export_onnx(tmp_path / "hf", tmp_path / "served")
    graph, model = OnnxModel(tmp_path / "served" / GRAPH), load_encoder(tmp_path / "hf").module.model
    assert graph.outputs == ["last_hidden_state", "sentence_embedding"]
    for batch, length in ((1, 1), (1, LENGTH), (3, 5), (5, LENGTH)):
        given = rows(batch, length)
        with torch.no_grad():
            expected = model(**given).last_hidden_state
        valid = given["attention_mask"].bool()
        torch.testing.assert_close(graph.run(given)["last_hidden_state"][valid], expected[valid], rtol=0, atol=1e-5)


def test_the_head_of_answers_has_two_outputs_that_predict_reads_as_one(tmp_path):
    folder = write_bert(tmp_path / "bert")
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(transformers.BertConfig.from_pretrained(folder)).eval()
    model.save_pretrained(folder)
    assert "→ start_logits, end_logits" in export_onnx(folder, tmp_path / "served")
    graph, given = OnnxModel(tmp_path / "served" / GRAPH), rows(3, 7)
    batch = Batch.of_texts(given["input_ids"], given["attention_mask"])._replace(segment_ids=given["token_type_ids"])
    with torch.no_grad():
        expected, valid = FamilyModel(model)(batch), given["attention_mask"].bool()
    torch.testing.assert_close(graph(batch)[valid], expected[valid], rtol=0, atol=1e-5)
    assert (expected.shape, graph.config.num_labels, graph.config.num_segments) == ((3, 7, 2), 2, 2)


def test_a_sentence_encoder_gives_the_vector_that_its_modules_say(tmp_path):
    folder = write_modules(write_bert(tmp_path / "bert"), "Transformer", "Pooling", "Normalize")
    said = export_onnx(folder, tmp_path / "served")
    assert "input_ids, attention_mask, token_type_ids → last_hidden_state, sentence_embedding" in said
    given = rows(3, 7)
    found = OnnxModel(tmp_path / "served" / GRAPH).run(given)
    lengths = given["attention_mask"].sum(1).tolist()
    for states, count, vector in zip(found["last_hidden_state"], lengths, found["sentence_embedding"], strict=True):
        mean = [sum(float(states[place, column]) for place in range(count)) / count for column in range(16)]
        norm = math.sqrt(sum(value**2 for value in mean))
        np.testing.assert_allclose(vector, [value / norm for value in mean], atol=1e-6)
    served = tmp_path / "served"
    files = {path.relative_to(served).as_posix() for path in served.rglob("*") if path.is_file()}
    jsons = {"config.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"}
    assert files == {GRAPH, SUMS, "vocab.txt"} | jsons
    check_sums(served)
    content = (served / GRAPH).read_bytes()
    (served / GRAPH).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("model.onnx has .*: damaged or changed", check_sums, served)


def test_modules_are_read_in_their_order_or_refused_by_name(tmp_path):
    assert modules_behind(tmp_path) == []
    for more, pooling, expected in (
        ((), {"pooling_mode": "cls"}, ["cls"]),
        (("Normalize",), POOLING | {"include_prompt": True}, ["mean", "normalize"]),
        ((), {"pooling_mode_max_tokens": True}, ["max"]),
        (("its_code.Normalize",), POOLING, "2_its_code.Normalize has no form in a graph"),
        (("Dense",), POOLING, "2_Dense has no form in a graph, which takes one pooling, cls"),
        ((), {"pooling_mode": "lasttoken"}, "lasttoken pooling has no form in a graph"),
        ((), POOLING | {"pooling_mode_max_tokens": True}, "mean and max pooling has no form"),
        ((), {}, "no pooling has no form"),
    ):
        write_modules(tmp_path, "Transformer", "Pooling", *more, pooling=pooling)
        if isinstance(expected, str):
            refused(re.escape(expected), modules_behind, tmp_path)
        else:
            assert modules_behind(tmp_path) == expected


def test_what_cannot_be_served_is_refused_in_one_line_and_not_written(tmp_path, monkeypatch):
    run = write_checkpoint(tmp_path / "run", tokenizer_of(tmp_path, WORDS))
    refused("a checkpoint; export it first: convert --load", export_onnx, run, tmp_path / "served")
    folder = write_bert(tmp_path / "bert")
    with monkeypatch.context() as patch:
        run = OnnxModel.run
        patch.setattr(OnnxModel, "run", lambda graph, given: {k: v * 1.001 for k, v in run(graph, given).items()})
        refused(r"the graph's outputs differ from the model's by 1.0e-03", export_onnx, folder, tmp_path / "served")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    wrong_arguments("is not a folder with a graph", export_onnx, folder, tmp_path / "full", overwrite=True)
    both = ["--load", "x", "--onnx", "x", "--output", "y"]
    wrong_arguments("--load --from-hf --onnx is required, and only one", convert.main, both)
    (tmp_path / "broken.onnx").write_bytes(b"text")
    refused("broken.onnx: onnxruntime cannot load it", OnnxModel, tmp_path / "broken.onnx")
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: 1 / 0)
    refused("torch cannot export it: division by zero", export_onnx, folder, tmp_path / "served")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused("^--onnx needs onnxscript, not installed here", export_onnx, folder, tmp_path / "served")
    assert not (tmp_path / "served").exists()
