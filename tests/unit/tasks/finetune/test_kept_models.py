"""config.json of a model that finetune kept from a foreign family: every damage is one line, also without its sums."""

import json
import shutil

import numpy as np
import pytest
import torch

from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.rows import pad_batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.task_files import load_finetuned
from megatron_ddrp.tasks.finetune.training import read_facts
from tests.unit.conversion.test_tokenizer_rules import make
from tests.unit.tasks.finetune.test_own_tasks import GLANCE, model_of, words

CPU = torch.device("cpu")
MISSING = object()
FACTS = [
    *(("task", value) for value in (None, [], "text", {}, MISSING)),
    *(("labels", value) for value in ("abc", [1, 2, 3], {"a": 1}, None, MISSING)),
    *(("kind", value) for value in ("other", 7, [])),
    *(("columns", value) for value in ({}, ["text"], [[], None, "label"], "abc", MISSING)),
    *(("max_seq_length", value) for value in (10**12, -1, 0, 1.5, True, None, "8", MISSING)),
    *(("score", value) for value in ("high", None, MISSING)),
    *(("run", value) for value in (3, MISSING)),
]


@pytest.fixture
def kept(topics, bert_folder, tmp_path):
    """The folder of a kept BERT."""
    assert main(words(topics, bert_folder, tmp_path / "out", *GLANCE)) == 0
    return model_of(tmp_path / "out")


def edit(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def put(values, key, value):
    """Put a value at a key of the facts, or of the task in them; `MISSING` removes it."""
    facts = values["finetuned"]
    holder = facts["task"] if key in ("labels", "kind") else facts
    if value is MISSING:
        del holder[key]
    else:
        holder[key] = value


def test_a_changed_config_json_is_refused_by_its_sum(kept):
    load_finetuned(kept, CPU)
    edit(kept, lambda values: values.update(layer_norm_eps=1e-3))
    for read in (lambda folder: load_finetuned(folder, CPU), load_encoder):
        with pytest.raises(UserError, match=r"config\.json has .*: damaged or changed since its export"):
            read(kept)
    assert read_facts(kept) is None


def test_damaged_facts_are_refused_also_without_sums(kept, tmp_path):
    (kept / SUMS).unlink()
    for number, (key, value) in enumerate(FACTS):
        folder = shutil.copytree(kept, tmp_path / f"damaged{number}")
        edit(folder, lambda values, key=key, value=value: put(values, key, value))
        with pytest.raises(UserError, match=r"config\.json") as refused:
            load_finetuned(folder, CPU)
        assert "\n" not in str(refused.value) and str(folder) in str(refused.value), (key, value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"id2label": {"0": "a"}, "label2id": {"a": 0}}, r"cannot load it|other labels|\[3"),
        ({"classifier_dropout": -1.0}, "transformers cannot load it: dropout"),
    ],
)
def test_impossible_heads_are_refused_without_sums(kept, topics, tmp_path, change, line):
    (kept / SUMS).unlink()
    edit(kept, lambda values: values.update(change))
    with pytest.raises(UserError, match=line):
        load_finetuned(kept, CPU)
    if "classifier_dropout" in change:
        with pytest.raises(UserError, match=line):
            main(words(topics, kept, tmp_path / "again", *GLANCE))


def test_a_sweep_beside_a_damaged_model_keeps_its_own_and_says_so(kept, topics, bert_folder, tmp_path, capsys):
    edit(kept, lambda values: put(values, "score", "high"))
    damaged = (kept / "config.json").read_bytes()
    assert main(words(topics, bert_folder, tmp_path / "out", *GLANCE)) == 0
    assert f"no model of {bert_folder} was kept; {kept} is damaged" in capsys.readouterr().out
    assert main(words(topics, bert_folder, tmp_path / "out", *GLANCE[:-1], "2")) == 0
    assert f"({kept} is damaged); to use it" in capsys.readouterr().out
    assert (kept / "config.json").read_bytes() == damaged


PAIRS = [("red cats", "the dogs sing", "yes"), ("green birds", "blue", "no")] * 8


def mixed_folder(folder, kind, family, **more):
    """A tiny model of class `kind` with the tokenizer of another family."""
    import transformers

    folder.mkdir()
    make(folder, family)
    pieces = find_tokenizer(folder).vocab_size
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(vocab_size=pieces, max_position_embeddings=40, **sizes, **more)
    getattr(transformers, f"{kind}ForMaskedLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "family", "more"),
    [
        ("Roberta", "bert", {"type_vocab_size": 1, "pad_token_id": 1}),
        ("Bert", "roberta", {"pad_token_id": 1}),
        ("Bert", "xlm-roberta", {"pad_token_id": 1}),
        ("Electra", "deberta", {"pad_token_id": 1}),
    ],
)
def test_a_kept_model_gets_the_rows_of_training_from_auto_tokenizer(tmp_path, kind, family, more):
    """The model's type is not its tokenizer: separators and segments are those of the folder's own."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = mixed_folder(tmp_path / "in", kind, family, **more)
    for name in ("train", "valid"):
        lines = (json.dumps({"text": a, "text_pair": b, "label": label}) for a, b, label in PAIRS)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert main(words(tmp_path, source, tmp_path / "out", *GLANCE)) == 0
    kept = load_finetuned(model_of(tmp_path / "out"), CPU)
    encoded, pair = kept.encode([PAIRS[0][:2]]), PAIRS[0][:2]
    batch = pad_batch(encoded, np.array([0])).map(torch.from_numpy)
    for folder in (source, model_of(tmp_path / "out")):
        row = AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
        assert torch.equal(row["input_ids"], batch.input_ids)
        if kept.model.model.config.type_vocab_size > 1:
            assert torch.equal(row.get("token_type_ids", batch.segment_ids * 0), batch.segment_ids)
    model = AutoModelForSequenceClassification.from_pretrained(model_of(tmp_path / "out")).eval()
    with torch.no_grad():
        torch.testing.assert_close(kept.model(batch), model(**row).logits, rtol=0, atol=1e-5)
    edit(model_of(tmp_path / "out"), lambda values: values["finetuned"].update(pair_separators=3))
    (model_of(tmp_path / "out") / SUMS).unlink()
    with pytest.raises(UserError, match="an earlier version trained it on pairs with 3 separators .* fine-tune again"):
        load_finetuned(model_of(tmp_path / "out"), CPU)


def test_segments_that_a_model_lacks_are_refused_by_name(tmp_path):
    folder = mixed_folder(tmp_path / "in", "Bert", "bert", pad_token_id=1)
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["post_processor"]["single"][0]["SpecialToken"]["type_id"] = 2  # as Funnel's
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="its tokenizer writes rows with 3 segments, .* and its model has 2") as refused:
        load_encoder(folder)
    assert "\n" not in str(refused.value)
