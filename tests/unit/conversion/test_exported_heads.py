"""The heads for fine-tuning in an export's code: new ones, their losses, and training under transformers' Trainer."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.conversion.families import HEADS
from megatron_ddrp.conversion.model_code import HEAD_FORMS
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from tests.unit.conversion.conftest import padded_pair_batch, write_checkpoint

FINE_TUNED = dict(zip(("sequence", "tokens", "qa"), (form.name for form in HEAD_FORMS), strict=True))
NEW = {
    "sequence": {"pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"},
    "tokens": {"classifier.weight", "classifier.bias"},
    "qa": {"qa_outputs.weight", "qa_outputs.bias"},
}
"""Kind of a head → names of its weights."""


def auto_class(kind):
    import transformers

    return getattr(transformers, f"AutoModelFor{FINE_TUNED[kind]}")


@pytest.fixture
def folders(tmp_path, tokenizer, offline):
    """One BERT of ours as two exports: with our own code, and as transformers' own class."""
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="absolute")
    export_checkpoint(run, tmp_path / "own", family_name="megatron_ddrp")
    export_checkpoint(run, tmp_path / "bert")
    return SimpleNamespace(own=tmp_path / "own", bert=tmp_path / "bert")


@pytest.mark.parametrize("kind", FINE_TUNED)
def test_a_masked_lm_loads_under_a_new_head_and_says_so(folders, kind):
    options = {"num_labels": 100, "classifier_dropout": 0.5} if kind != "qa" else {}
    settings = json.loads((folders.own / "config.json").read_text()) | {"initializer_range": 0.5}
    (folders.own / "config.json").write_text(json.dumps(settings))
    model, report = auto_class(kind).from_pretrained(
        folders.own, trust_remote_code=True, output_loading_info=True, **options
    )
    assert type(model).__name__ == f"DdrpFor{FINE_TUNED[kind]}"
    assert set(report["missing_keys"]) == NEW[kind]
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
def test_every_kind_trains_under_the_trainer_and_is_saved_whole(tmp_path, tokenizer, offline, kind):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import AutoModel, Trainer, TrainingArguments

    export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer), tmp_path / "hf")
    model = auto_class(kind).from_pretrained(tmp_path / "hf", trust_remote_code=True)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    labels = {
        "sequence": {"labels": [1, 0, 1]},
        "tokens": {"labels": (ids % 2).tolist()},
        "qa": {"start_positions": [1, 4, 0], "end_positions": [3, 12, 1]},
    }[kind]
    columns = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "unread": [0, 0, 0], **labels}
    rows = [{name: values[row] for name, values in columns.items()} for row in range(3)]
    settings = TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        max_steps=6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.9 * before
    trainer.save_model(tmp_path / "saved")
    again = auto_class(kind).from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    encoder = AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert all(torch.equal(tensor, model.encoder.state_dict()[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize("encoding", ["ddrp", "rope"])
def test_the_code_suits_older_versions_of_transformers(tmp_path, tokenizer, offline, encoding):
    """They copy only direct imports of a local folder, and save only the code of registered classes."""
    from transformers.dynamic_module_utils import get_relative_imports

    export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding), tmp_path / "hf")
    code = tmp_path / "hf" / "modeling_ddrp.py"
    assert set(get_relative_imports(code)) == {path.stem for path in code.parent.glob("*.py")} - {code.stem}
    expected = {f"DdrpFor{name}": f"AutoModelFor{name}" for name in FINE_TUNED.values()}
    expected |= {f"DdrpFor{head.name}": f"AutoModelFor{head.auto}" for head in HEADS.values()}
    registered = re.findall(r"^(\w+)\.register_for_auto_class\(\"(\w+)\"\)$", code.read_text(), re.MULTILINE)
    assert dict(registered) == expected | {"DdrpModel": "AutoModel"}
