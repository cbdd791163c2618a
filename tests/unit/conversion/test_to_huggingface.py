"""An exported folder computes what the training model computes."""

import shutil

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, read_state, write_state
from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import count_parameters
from tests.integration.launch import run_program
from tests.unit.conversion.conftest import SEQ_LENGTH, ours, padded_pair_batch, write_checkpoint

ARCHITECTURES = [
    {"position_encoding": encoding, "layernorm_position": layernorm, "relative_table": table}
    for encoding in ENCODINGS
    for layernorm, table in (("post", "shared"), ("pre", "per-layer"))
] + [
    {"position_encoding": "absolute", "layernorm_position": "pre"},
    {"position_encoding": "absolute", "deberta_emd": True},
    {"position_encoding": "deberta", "deberta_emd": False},
    {"position_encoding": "deberta", "num_layers": 1},
    {"position_encoding": "ddrp", "relative_distance": 1},
    {"position_encoding": "ddrp", "deberta_emd": True, "layernorm_position": "pre"},
    {"position_encoding": "ddrp", "absolute_embedding": True},
    {"position_encoding": "deberta", "absolute_embedding": True, "layernorm_position": "pre"},
    {"position_encoding": "tupe-r", "absolute_embedding": True, "relative_distance": 12},
    {
        "position_encoding": "rope",
        "local_attention": 6,
        "global_every": 2,
        "local_rope_theta": 9.0,
        "deberta_emd": True,
    },
    {
        **{"position_encoding": "alibi", "layernorm_position": "pre", "first_norm": False, "norm": "rmsnorm"},
        **{"ffn": "geglu", "bias": False, "num_segments": 0, "embedding_size": 16},
    },
]
PLAIN = {"absolute": "BertForMaskedLM", "deberta-v2": "DebertaV2ForMaskedLM"}
"""Encoding → the class of transformers that is equal to its post-norm model with a shared table."""


@pytest.mark.parametrize("settings", ARCHITECTURES, ids=lambda settings: " ".join(map(str, settings.values())))
@torch.no_grad()
def test_hidden_states_and_logits_are_equal(tmp_path, tokenizer, offline, settings):
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

    load = write_checkpoint(tmp_path / "run", tokenizer, **settings)
    export = export_checkpoint(load, tmp_path / "hf")
    model, _, config = load_model(load)
    assert sum(weight.numel() for weight in export.weights.values()) == count_parameters(model)[0]

    usual = {"layernorm_position": "post", "relative_table": "shared"}.items() <= settings.items()
    plain = PLAIN.get(settings["position_encoding"]) if usual else None
    options = {} if plain else {"trust_remote_code": True}
    loaded, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True, **options)
    assert type(loaded).__name__ == (plain or "DdrpForMaskedLM")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.config.vocab_size == tokenizer.vocab_size < config.model.padded_vocab_size

    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    valid = mask.bool()
    states, logits = ours(model, ids, segments, mask)
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    output = loaded.eval()(**inputs, output_hidden_states=True, output_attentions=not plain)
    torch.testing.assert_close(output.logits[valid], logits[valid], atol=1e-5, rtol=1e-5)
    for theirs, expected in zip(output.hidden_states, states, strict=True):
        torch.testing.assert_close(theirs[valid], expected[valid], atol=1e-5, rtol=1e-5)
    if not plain:
        assert output.attentions[0].shape == (3, 4, SEQ_LENGTH, SEQ_LENGTH)
        assert output.attentions[0].masked_select(~valid[:, None, None, :]).max() == 0

    encoder = AutoModel.from_pretrained(tmp_path / "hf", **options).eval()
    last = encoder(**inputs).last_hidden_state
    torch.testing.assert_close(last[valid], states[-1][valid], atol=1e-5, rtol=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", num_labels=3, **options).eval()
    weights = classifier.base_model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in loaded.base_model.state_dict().items())
    assert classifier(**inputs).logits.shape == (3, 3)


def own_code_model(tmp_path, tokenizer, auto_class, encoding="ddrp", **options):
    settings = {"position_encoding": encoding, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer, **settings), tmp_path / "hf")
    return auto_class.from_pretrained(tmp_path / "hf", trust_remote_code=True, **options).eval()


@pytest.mark.parametrize("encoding", ["ddrp", "tupe-r", "deberta"])
def test_own_model_trains_saves_and_grows(tmp_path, tokenizer, offline, encoding):
    from transformers import AutoModelForMaskedLM

    model = own_code_model(tmp_path, tokenizer, AutoModelForMaskedLM, encoding)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    labels = torch.where(torch.arange(SEQ_LENGTH) % 3 == 0, ids, -100)
    output = model(ids, mask, segments, labels=labels)
    chosen = labels != -100
    expected = torch.nn.functional.cross_entropy(output.logits[chosen], labels[chosen])
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    assert isinstance(model(ids, return_dict=False), tuple)

    model.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    before = model(ids).logits
    model.resize_token_embeddings(tokenizer.vocab_size + 5)
    grown = model(ids).logits
    torch.testing.assert_close(grown[..., : tokenizer.vocab_size], before)
    assert grown.shape[-1] == tokenizer.vocab_size + 5


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (torch.tensor([0, 2, 1]), {"num_labels": 3}),
        (torch.tensor([0.5, 2.0, 5.0]), {"num_labels": 1}),
        (torch.eye(3), {"num_labels": 3, "problem_type": "multi_label_classification"}),
    ],
)
def test_own_classifier_trains_each_kind_of_label(tmp_path, tokenizer, offline, labels, options):
    from transformers import AutoModelForSequenceClassification

    model = own_code_model(tmp_path, tokenizer, AutoModelForSequenceClassification, **options)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, mask, segments, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("encoding", ["tupe-a", "deberta"])
def test_too_long_an_input_names_both_lengths(tmp_path, tokenizer, offline, encoding):
    """TUPE's positions end in the encoder, those of a mask decoder only before the head."""
    from transformers import AutoModelForMaskedLM

    model = own_code_model(tmp_path, tokenizer, AutoModelForMaskedLM, encoding)
    ids = torch.ones(1, SEQ_LENGTH + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{SEQ_LENGTH + 1} tokens.*{SEQ_LENGTH} positions"):
        model(ids)
    if encoding == "deberta":
        assert model.encoder(ids).last_hidden_state.shape[1] == SEQ_LENGTH + 1


def run_tool(*arguments):
    return run_program("tools/convert_checkpoint.py", *arguments)


def test_command_converts_and_says_what_it_did(tmp_path, tokenizer, offline):
    from transformers import AutoModelForMaskedLM

    load, output = write_checkpoint(tmp_path / "run", tokenizer), tmp_path / "hf"
    first = run_tool("--load", load, "--output", output)
    assert first.returncode == 0, first.stderr
    model = AutoModelForMaskedLM.from_pretrained(output, trust_remote_code=True)
    assert f"{model.num_parameters():,} parameters" in first.stdout
    assert "108 rows of vocabulary padding" in first.stdout and "iter_0000003" in first.stdout
    again = run_tool("--load", load, "--output", output)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1 and "--overwrite" in again.stderr


def test_overwrite_replaces_hugging_face_folders_alone(tmp_path, tokenizer):
    load, output = write_checkpoint(tmp_path / "run", tokenizer), tmp_path / "hf"
    export_checkpoint(load, output)
    (output / "stale").write_text("x")
    for name in ("hf.tmp", "hf.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    export_checkpoint(load, output, overwrite=True)
    for name in ("hf.tmp", "hf.replaced"):
        assert (tmp_path / name / "mine").read_text() == "mine"
        shutil.rmtree(tmp_path / name)
    assert not (output / "stale").exists() and (output / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run", "vocab.txt"]
    with pytest.raises(UserError, match="not a Hugging Face folder"):
        export_checkpoint(load, load, overwrite=True)
    assert (load / "latest").exists()


def test_a_failed_export_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    load = write_checkpoint(tmp_path / "run", tokenizer)
    monkeypatch.setattr("megatron_ddrp.conversion.to_huggingface.write_tokenizer", fail)
    with pytest.raises(UserError, match="hf: No space left on device"):
        export_checkpoint(load, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "vocab.txt"]


def test_what_cannot_be_exported_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="no checkpoint"):
        export_checkpoint(tmp_path / "missing", tmp_path / "hf")
    load = write_checkpoint(tmp_path / "run", tokenizer)
    state_file = load / "iter_0000003" / "state.json"
    state = read_state(state_file.parent)
    state["config"]["model"]["position_encoding"] = "spiral"
    write_state(state_file.parent, state)
    with pytest.raises(UserError, match="'spiral'.*absolute, bert-r"):
        export_checkpoint(load, tmp_path / "hf")
    for damaged in ("{", "{}", '{"config": 3}'):
        state_file.write_text(damaged)
        with pytest.raises(UserError, match="state.json is damaged"):
            export_checkpoint(load, tmp_path / "hf")
