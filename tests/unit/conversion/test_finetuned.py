"""A fine-tuned model leaves as a folder that transformers loads, with our scores, and comes back as an encoder."""

import json

import pytest
import torch
from parity import CASES, write_run

from megatron_ddrp import checkpoint
from megatron_ddrp.conversion.from_huggingface import load_hugging_face
from megatron_ddrp.conversion.heads_ddrp import TaskHead
from megatron_ddrp.conversion.model_code import HEAD_FORMS, Labels
from megatron_ddrp.conversion.to_huggingface import TunedHead, write_finetuned
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import padded_pair_batch, write_checkpoint

LABELS = ("no", "maybe", "yes")
FORMS = dict(zip(("sequence", "tokens", "qa"), HEAD_FORMS, strict=True))
SHAPES = {
    "sequence": {"pooler.dense": (32, 32), "classifier": (3, 32)},
    "tokens": {"classifier": (3, 32)},
    "qa": {"qa_outputs": (2, 32)},
}
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "electra": "Ddrp",
    "modernbert": "Ddrp",
    "megatron_ddrp": "Ddrp",
}
"""Family that a masked LM leaves as → beginning of the class that its fine-tuned model is written as."""


def make_head(kind, problem_type=None):
    """Return a head of random weights for a model of width 32."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in SHAPES[kind].items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
        weights[f"{name}.bias"] = torch.randn(shape[:1], generator=generator)
    form = FORMS[kind]
    head = TaskHead(32, len(weights[f"{form.output}.bias"]), form.is_pooled, 0.1, form.output)
    head.load_state_dict(weights)
    return TunedHead(head, form, Labels(() if kind == "qa" else LABELS, problem_type))


def expected_scores(model, head, ids, segments, mask):
    """Return each row's scores, one row and one token at a time, as the heads' definitions say."""
    weights = head.head.state_dict()
    rows = []
    for row, row_segments, length in zip(ids, segments, mask.sum(1).tolist(), strict=True):
        inputs = (row[None, :length], row_segments[None, :length])
        hidden = model.encode(*inputs, torch.ones(1, length).long(), torch.arange(length)[None])[0]  # [length, hidden]
        if head.form.is_pooled:
            pooled = (weights["pooler.dense.weight"] @ hidden[0] + weights["pooler.dense.bias"]).tanh()
            rows.append(weights["classifier.weight"] @ pooled + weights["classifier.bias"])
        else:
            name = head.form.output
            rows.append(torch.stack([weights[f"{name}.weight"] @ h + weights[f"{name}.bias"] for h in hidden]))
    return rows


def found_scores(loaded, ids, segments, mask):
    """Return each row's scores by transformers, without its padding."""
    types = {"token_type_ids": segments} if loaded.config.type_vocab_size > 1 else {}
    output = loaded.eval()(input_ids=ids, attention_mask=mask, **types)
    if "start_logits" in output:
        scores = torch.stack([output.start_logits, output.end_logits], dim=-1)
    else:
        scores = output.logits
    return [row if row.dim() == 1 else row[:length] for row, length in zip(scores, mask.sum(1).tolist(), strict=True)]


@torch.no_grad()
def check_folder(model, tokenizer, kind, folder):
    """Write the model under a head, load it as users do, compare all scores, and return the loaded model."""
    import transformers

    head = make_head(kind)
    line = write_finetuned(model, tokenizer, head, folder)
    auto_class = f"AutoModelFor{FORMS[kind].name}"
    trust = ", trust_remote_code=True" if (folder / "modeling_ddrp.py").exists() else ""
    assert line == f'{auto_class}.from_pretrained("{folder}"{trust})'
    loaded, report = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=bool(trust), output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    ids = torch.where(mask > 0, ids, tokenizer.pad_id)
    segments = segments * (model.config.num_segments > 1)
    found = found_scores(loaded, ids, segments, mask)
    expected = expected_scores(model, head, ids, segments, mask)
    for theirs, ours in zip(found, expected, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    return loaded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family_under_a_head_of_texts(tmp_path, offline, case):
    run = write_run(case, tmp_path / "run")
    model, tokenizer, _ = checkpoint.read_model(checkpoint.choose_checkpoint(run))
    loaded = check_folder(model, tokenizer, "sequence", tmp_path / "tuned")
    assert type(loaded).__name__ == f"{CLASSES[case.family.model_type]}ForSequenceClassification"
    assert loaded.config.id2label == dict(enumerate(LABELS))
    assert loaded.config.label2id == {name: i for i, name in enumerate(LABELS)}


MODELS = {
    "absolute": {"position_encoding": "absolute"},
    "ddrp": {"position_encoding": "ddrp"},
    "rope": {"position_encoding": "rope"},
    "deberta": {"position_encoding": "deberta", "key_bias": False, "num_segments": 0},
    "modern": {
        **{"position_encoding": "rope", "layernorm_position": "pre", "first_norm": False, "ffn": "geglu"},
        **{"bias": False, "num_segments": 0, "local_attention": 6, "global_every": 2},
    },
}


@pytest.mark.parametrize("kind", ["tokens", "qa"])
@pytest.mark.parametrize("name", MODELS)
def test_heads_of_tokens_and_answers(tmp_path, offline, tokenizer, name, kind):
    run = write_checkpoint(tmp_path / "run", tokenizer, **MODELS[name])
    model, _, _ = checkpoint.read_model(checkpoint.choose_checkpoint(run))
    plain = {"absolute": "Bert", "deberta": "Deberta"}
    loaded = check_folder(model, tokenizer, kind, tmp_path / "tuned")
    assert type(loaded).__name__ == f"{plain.get(name, 'Ddrp')}For{FORMS[kind].name}"
    settings = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert ("id2label" in settings) == (kind == "tokens")


@pytest.mark.parametrize("name", ["absolute", "ddrp"])
@torch.no_grad()
def test_a_folder_comes_back_as_an_encoder_without_its_head(tmp_path, offline, tokenizer, name):
    run = write_checkpoint(tmp_path / "run", tokenizer, **MODELS[name])
    model, _, _ = checkpoint.read_model(checkpoint.choose_checkpoint(run))
    head = make_head("sequence", problem_type="single_label_classification")
    write_finetuned(model, tokenizer, head, tmp_path / "tuned", {"fine_tuning": {"max_seq_length": 16}})
    settings = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert settings["problem_type"] == "single_label_classification"
    assert settings["fine_tuning"] == {"max_seq_length": 16}
    encoder = load_encoder(tmp_path / "tuned")
    assert "missing: none; not used: 4 (" in encoder.origin
    assert all(name in encoder.origin for name in ("classifier.bias", "classifier.weight", "pooler.dense.bias"))
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    again, _, _ = load_hugging_face(tmp_path / "tuned")
    inputs = ids, segments, mask, torch.arange(ids.shape[1]).expand_as(ids) * mask
    torch.testing.assert_close(again.encode(*inputs), model.encode(*inputs), atol=0, rtol=0)
    assert encoder.tokenizer.pieces == tokenizer.pieces


def test_a_model_in_half_precision_is_left_as_it_is(tmp_path, offline, tokenizer):
    run = write_checkpoint(tmp_path / "run", tokenizer, objective="electra")
    model, _, _ = checkpoint.read_model(checkpoint.choose_checkpoint(run))
    model = model.train().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_finetuned(model, tokenizer, make_head("tokens"), tmp_path / "tuned")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.state_dict().values())


def test_a_folder_that_would_not_load_is_not_written(tmp_path, offline, tokenizer, monkeypatch):
    run = write_checkpoint(tmp_path / "run", tokenizer)
    model, _, _ = checkpoint.read_model(checkpoint.choose_checkpoint(run))
    head = make_head("tokens")
    monkeypatch.setattr(TunedHead, "scores", lambda self, hidden: {"logits": hidden[..., :3]})
    with pytest.raises(UserError, match="exported model's logits differ from the checkpoint's"):
        write_finetuned(model, tokenizer, head, tmp_path / "tuned")
    model.layers[0].attention.query.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="layers.0.attention.query.weight is not finite because training diverged"):
        write_finetuned(model, tokenizer, head, tmp_path / "tuned")
    assert not list(tmp_path.glob("*tuned*"))
