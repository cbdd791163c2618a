"""Models that finetune keeps: which run's, where, for whom; every damage is one line, also without its sums."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_ddrp.commands import convert
from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer
from megatron_ddrp.data.atomic import SUM, seal_object
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.rows import pad_batch
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.task_files import load_finetuned
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import change_json
from tests.unit.conversion.tokenizers_of_families import make
from tests.unit.tasks.conftest import GLANCE, model_of, predict, rows, words, write_bert, write_topics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return a folder with `topics`, `bert`, and `out`, a finished sweep: read only."""
    folder = tmp_path_factory.mktemp("sweep")
    assert main(words(write_topics(folder / "topics"), write_bert(folder / "bert"), folder / "out", *GLANCE)) == 0
    return folder


@pytest.fixture
def kept(sweep, tmp_path):
    """The folder of a kept BERT, in a copy of the sweep's output."""
    return model_of(shutil.copytree(sweep / "out", tmp_path / "out"))


def edit(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_damaged_facts_and_impossible_heads_are_refused_also_without_sums(kept, sweep, tmp_path):
    (kept / SUMS).unlink()
    whole = (kept / "config.json").read_text()
    for key, value in (
        *(("task", "text"), ("labels", "abc"), ("kind", "other"), ("columns", ["text"]), ("score", "high")),
        *(("max_seq_length", 10**12), ("max_seq_length", 3), ("run", None)),
    ):
        values = json.loads(whole)
        holder = values["finetuned"]["task"] if key in ("labels", "kind") else values["finetuned"]
        holder[key] = value
        (kept / "config.json").write_text(json.dumps(values))
        assert str(kept) in str(refused(r"config\.json", load_finetuned, kept, CPU)), (key, value)
    for change, line in (
        ({"id2label": {"0": "a"}, "label2id": {"a": 0}}, r"cannot load it|other labels|\[3"),
        ({"classifier_dropout": -1.0}, "transformers cannot load it: dropout"),
    ):
        (kept / "config.json").write_text(json.dumps(json.loads(whole) | change))
        refused(line, load_finetuned, kept, CPU)
    refused(line, main, words(sweep / "topics", kept, tmp_path / "again", *GLANCE))


def test_a_sweep_beside_a_damaged_model_keeps_its_own_and_says_so(kept, sweep, out, capsys):
    edit(kept, lambda values: values["finetuned"].update(score="high"))
    damaged, command = (kept / "config.json").read_bytes(), words(sweep / "topics", sweep / "bert", out)
    assert main([*command, *GLANCE]) == 0
    assert f"no model of {sweep / 'bert'} was kept; {kept} is damaged" in capsys.readouterr().out
    assert main([*command, *GLANCE[:-1], "2"]) == 0
    assert f"({kept} is damaged); to use it" in capsys.readouterr().out
    assert (kept / "config.json").read_bytes() == damaged


def write_facts(folder, columns=("text", None, "label")):
    """Write the config.json of a kept model, as far as `predict` looks at it before weights; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    task = {"name": "reviews", "metric": "accuracy", "kind": "classification", "labels": ["no", "yes"]}
    facts = {"task": task, "data": "", "score": 0.5, "run": "", "columns": columns, "max_seq_length": 64}
    (folder / "config.json").write_text(json.dumps({"finetuned": facts}))
    return folder


def test_predict_refuses_what_it_cannot_do(sweep, tmp_path):
    source = sweep / "topics" / "new.jsonl"
    refused(r"expected a name that ends in \.jsonl, \.csv, \.tsv", predict, sweep / "bert", source, tmp_path / "x.txt")
    model, said = write_facts(tmp_path / "reviews"), "--text-pair-column title: .* was trained on single texts; leave"
    wrong_arguments(said, load_finetuned, model, CPU, (None, "title"))


def test_a_wrong_model_folder_is_answered_with_the_models_beside_it(out, tmp_path):
    """Beside and below the wrong folder; a damaged name, OUT itself and OUT/models are the usual mistakes."""
    model = write_facts(out / "models" / "reviews-815d2790")
    write_facts(model.parent / "MNLI-815d2790", columns=None)
    (model.parent / "notes.txt").write_text("")
    for wrong in ("out", "out/models", "out/models/reviews-runabs", "out/reviews", "out/models/MNLI-815d2790"):
        got = "not a model that finetune kept" if (tmp_path / wrong).exists() else "no such folder"
        said = re.escape(f"--load {tmp_path / wrong}: {got}; expected one of {model}")
        refused(f"^{said}$", load_finetuned, tmp_path / wrong, CPU)
    refused("no such folder; expected a folder OUT/models/TASK-…", load_finetuned, tmp_path / "elsewhere" / "x", CPU)


def test_a_model_that_predicts_nothing_finite_says_null(kept, sweep, tmp_path):
    (kept / SUMS).unlink()
    weights = load_file(kept / "model.safetensors")
    save_file({name: tensor * torch.nan for name, tensor in weights.items()}, kept / "model.safetensors")
    told = predict(kept, sweep / "topics" / "new.jsonl", tmp_path / "told.jsonl")
    assert {json.loads(line)["prediction"] for line in told.open()} == {None}


def test_a_kept_model_that_lacks_anything_is_refused(topics, checkpoint_folder, out, tmp_path, capfd):
    """Without weights of the encoder, the pooler and the classifier in turn, and with weights of other shapes.

    Under bf16 the weights in fp32 are kept.
    """
    main(words(topics, checkpoint_folder, out, *GLANCE, "--bf16"))
    model, told = model_of(out), tmp_path / "told.jsonl"
    path = model / "model.safetensors"
    tensors = load_file(path)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert any((tensor != tensor.bfloat16()).any() for tensor in tensors.values())
    (model / SUMS).unlink()
    for name in ("classifier.weight", "classifier.bias", "pooler.dense.bias", *list(tensors)[::7]):
        (dropped,) = (key for key in tensors if key.endswith(name))
        save_file({key: tensor for key, tensor in tensors.items() if key != dropped}, path)
        error = refused(f"it lacks the weight {dropped}; fine-tune again", predict, model, topics / "new.jsonl", told)
        assert error.exit_code == 1 and not told.exists() and "MISSING" not in capfd.readouterr().err
    other = next(key for key in tensors if ".0." in key).replace(".0.", ".9.")
    for changed, said in (
        ({"classifier.bias": torch.zeros(7)}, r"the weight for classifier.bias is \[7\], but config.json requires"),
        ({other: torch.zeros(2)}, "has no place for the weight"),
    ):
        save_file(tensors | changed, path)
        refused(said, predict, model, topics / "new.jsonl", told)


@pytest.mark.parametrize("checkpoint_folder", ["ddrp"], indirect=True)
def test_a_run_that_diverged_or_keeps_no_model_leaves_none(topics, bert_folder, checkpoint_folder, out, capsys):
    for load in (bert_folder, checkpoint_folder):
        main([*words(topics, load, out, *GLANCE), "--lr", "1e12"])
    assert [(row["score"], row["undefined"]) for row in rows(out)] == [(0.0, True)] * 2
    assert capsys.readouterr().out.count("no model of") == 2
    assert not [path for path in (out / "models").glob("*") if path.is_dir()]
    more = ("--no-keep-models", "--test", topics / "new.jsonl")
    main(words(topics, bert_folder, out / "unkept", *GLANCE, *more))
    assert f"was kept; {topics / 'new.jsonl'} is not predicted" in capsys.readouterr().out
    assert not (out / "unkept" / "models").exists()


def test_a_better_run_that_kept_no_model_is_named(kept, sweep, out, capsys):
    (row,) = rows(out)
    score = row["score"] + 0.1
    better = seal_object({name: row[name] for name in row if name != SUM} | {"seed": 9, "score": score})
    (out / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, better)))
    main(words(sweep / "topics", sweep / "bert", out, *GLANCE))
    told = f"is in {kept} (of those kept; the better run {TuningRun.of_row(better).name} kept none: to repeat it"
    assert told in capsys.readouterr().out


def test_kept_models_and_their_graphs_are_scored_side_by_side(kept, sweep, tmp_path, capsys):
    """Rows and groups; the graph predicts what the model does, also into a file."""
    valid = [json.loads(line) for line in (sweep / "topics" / "valid.jsonl").read_text().splitlines()]
    lines = (json.dumps(row | {"field": number % 2}) + "\n" for number, row in enumerate(valid))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    convert.main(["--onnx", str(kept), "--output", str(tmp_path / "served"), "--int8"])
    graph, int8 = (tmp_path / "served" / "onnx" / f"model{name}.onnx" for name in ("", "_int8"))
    assert f"next:    megatron-ddrp finetune evaluate --load {kept} {graph} {int8} --input" in capsys.readouterr().out
    models = map(str, (kept, graph, int8))
    assert main(["evaluate", "--load", *models, "--input", str(tmp_path / "rows.jsonl"), "--groups", "field"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    told = [dict(zip(names, row, strict=True)) for row in cells]
    places = [(row["rows"], row["number"], row["model"]) for row in told]
    sizes = {"rows.jsonl": "21", "rows.jsonl/0": "11", "rows.jsonl/1": "10"}
    assert places == [(name, size, str(path)) for name, size in sizes.items() for path in (kept, graph, int8)]
    (stored,) = rows(kept.parent.parent)
    of_model, of_graph = told[:2]
    score = pytest.approx(float(of_model["accuracy"]), abs=0.01)
    assert 100 * stored["score"] == score and of_model["minus the first"] == ""
    assert (of_graph["accuracy"], of_graph["minus the first"]) == (of_model["accuracy"], "+0.00")
    assert of_graph["95 % of the difference"] == "+0.00 to +0.00"
    assert sum(float(told[place]["accuracy"]) * int(told[place]["number"]) for place in (3, 6)) / 21 == score
    low, high = map(float, of_model["95 % over items"].split(" to "))
    assert low <= float(of_model["accuracy"]) <= high
    new = sweep / "topics" / "new.jsonl"
    assert predict(kept, new, tmp_path / "a.jsonl").read_text() == predict(graph, new, tmp_path / "b.jsonl").read_text()
    edit(tmp_path / "served", lambda values: values.update(layer_norm_eps=1e-3))
    refused("damaged or changed since its export", load_finetuned, graph, CPU)


def test_models_of_other_tasks_and_rows_without_labels_are_not_compared(kept, sweep, tmp_path):
    def run(*load, source="valid"):
        return main(["evaluate", "--load", *map(str, load), "--input", str(sweep / "topics" / f"{source}.jsonl")])

    other = shutil.copytree(kept, tmp_path / "other")
    (other / SUMS).unlink()
    edit(other, lambda values: values["finetuned"]["task"].update(metric="macro-f1"))
    refused(f"its task is classification by macro-f1, that of {kept} classification by accuracy", run, kept, other)
    refused("new.jsonl, line 1: no column 'label', it has id, text", run, kept, source="new")
    refused("not a model that finetune kept", run, sweep / "bert")


PAIRS = [("red cats", "the dogs sing", "yes"), ("green birds", "blue", "no")] * 8


def mixed_folder(folder, kind, family, **more):
    """A tiny model of class `kind` with the tokenizer of another family."""
    folder.mkdir()
    make(folder, family)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": find_tokenizer(folder).vocab_size, "max_position_embeddings": 40, "pad_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    getattr(transformers, f"{kind}ForMaskedLM")(config).save_pretrained(folder)
    return folder


FAMILIES = {("Roberta", "bert"): {"type_vocab_size": 1}, ("Bert", "roberta"): {}, ("Electra", "deberta"): {}}


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_a_kept_model_gets_the_rows_of_training_from_auto_tokenizer(out, tmp_path, kind, family):
    """The model's type is not its tokenizer: separators and segments are those of the folder's own."""
    source = mixed_folder(tmp_path / "in", kind, family, **FAMILIES[kind, family])
    for name in ("train", "valid"):
        lines = (json.dumps({"text": a, "text_pair": b, "label": label}) for a, b, label in PAIRS)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert main(words(tmp_path, source, out, *GLANCE)) == 0
    folder, pair = model_of(out), PAIRS[0][:2]
    kept = load_finetuned(folder, CPU)
    batch = pad_batch(kept.encode([pair]), np.array([0])).map(torch.from_numpy)
    for one in (source, folder):
        row = transformers.AutoTokenizer.from_pretrained(one)(*pair, return_tensors="pt")
        assert torch.equal(row["input_ids"], batch.input_ids)
        if kept.model.model.config.type_vocab_size > 1:
            assert torch.equal(row.get("token_type_ids", batch.segment_ids * 0), batch.segment_ids)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(kept.model(batch), model(**row).logits, rtol=0, atol=1e-5)
    edit(folder, lambda values: values["finetuned"].update(pair_separators=3))
    (folder / SUMS).unlink()
    said = "an earlier version trained it on pairs with 3 separators .* fine-tune again"
    refused(said, load_finetuned, folder, CPU)


def test_segments_that_a_model_lacks_are_refused_by_name(tmp_path):
    folder = mixed_folder(tmp_path / "in", "Bert", "bert")
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["post_processor"]["single"][0]["SpecialToken"]["type_id"] = 2  # as Funnel's
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}
    change_json(folder / "tokenizer_config.json", **settings)
    refused("its tokenizer writes rows with 3 segments, .* and its model has 2", load_encoder, folder)
