"""An exported folder computes what its model and its head compute; its sums show a change that no reader could see."""

import json
import random
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from parity import CASES, Case, draw, write_run

from megatron_ddrp.checkpoint import load_model, read_state, write_state
from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.contract import CARD, SUMS, refuse_output
from megatron_ddrp.conversion.from_huggingface import import_folder, load_hugging_face
from megatron_ddrp.conversion.heads_ddrp import TaskHead
from megatron_ddrp.conversion.model_code import HEAD_FORMS, Labels
from megatron_ddrp.conversion.to_huggingface import TunedHead, export_checkpoint, write_finetuned
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.model import count_parameters
from tests.refusals import refused
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import READERS, SEQ_LENGTH, encoded, padded_pair_batch, write_checkpoint

pytestmark = pytest.mark.usefixtures("few_probes")

ARCHITECTURES = [{"position_encoding": encoding, "layernorm_position": "pre"} for encoding in ENCODINGS] + [
    {"position_encoding": "absolute", "deberta_emd": True},
    {"position_encoding": "deberta", "deberta_emd": False},
    {"position_encoding": "deberta", "num_layers": 1},
    {"position_encoding": "ddrp", "relative_distance": 1},
    {"position_encoding": "ddrp", "deberta_emd": True, "layernorm_position": "pre"},
    {"position_encoding": "ddrp", "absolute_embedding": True},
    {"position_encoding": "deberta", "absolute_embedding": True, "layernorm_position": "pre"},
    {"position_encoding": "tupe-r", "absolute_embedding": True, "relative_distance": 12},
    {"position_encoding": "rope", "local_attention": 6, "global_every": 2, "local_rope_theta": 9.0}
    | {"rope_theta": 50.0, "deberta_emd": True},
    {"position_encoding": "alibi", "layernorm_position": "pre", "first_norm": False, "norm": "rmsnorm"}
    | {"ffn": "geglu", "bias": False, "num_segments": 0, "embedding_size": 16},
    {"position_encoding": "t5", "ffn": "swiglu", "bias": False, "norm_bias": True, "embedding_norm": False},
]
"""Models of our own code. test_model_code.py has every encoding under post-norm, with a table in each layer; those that
are classes of transformers are in test_families.py."""


@pytest.mark.parametrize("settings", ARCHITECTURES, ids=lambda settings: " ".join(map(str, settings.values())))
@torch.no_grad()
def test_hidden_states_and_logits_are_equal(tmp_path, tokenizer, offline, settings):
    from transformers import AutoModelForMaskedLM

    load = write_checkpoint(tmp_path / "run", tokenizer, **settings)
    export = export_checkpoint(load, tmp_path / "hf")
    model, _, config = load_model(load)
    assert sum(weight.numel() for weight in export.weights.values()) == count_parameters(model)[0]
    options = {"trust_remote_code": True, "output_loading_info": True}
    loaded, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", **options)
    assert type(loaded).__name__ == "DdrpForMaskedLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.config.vocab_size == tokenizer.vocab_size < config.model.padded_vocab_size
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    valid = mask.bool()
    states, logits = conftest.ours(model, ids, segments, mask)
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    output = loaded.eval()(**inputs, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(output.logits[valid], logits[valid], atol=1e-5, rtol=1e-5)
    for theirs, expected in zip(output.hidden_states, states, strict=True):
        torch.testing.assert_close(theirs[valid], expected[valid], atol=1e-5, rtol=1e-5)
    assert output.attentions[0].shape == (3, 4, SEQ_LENGTH, SEQ_LENGTH)
    assert output.attentions[0].masked_select(~valid[:, None, None, :]).max() == 0


@pytest.fixture
def own_code_model(export_of, offline):
    """Encoding → the masked LM of an export with code of our own."""
    from transformers import AutoModelForMaskedLM

    return lambda encoding: AutoModelForMaskedLM.from_pretrained(export_of(encoding), trust_remote_code=True).eval()


@pytest.mark.parametrize("encoding", ["ddrp", "tupe-r", "deberta"])
def test_own_model_trains_saves_and_grows(tmp_path, tokenizer, own_code_model, encoding):
    from transformers import AutoModelForMaskedLM

    model = own_code_model(encoding)
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    labels = torch.where(torch.arange(SEQ_LENGTH) % 3 == 0, ids, -100)
    output, chosen = model(ids, mask, segments, labels=labels), labels != -100
    expected = torch.nn.functional.cross_entropy(output.logits[chosen], labels[chosen])
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == [], "silent"
    assert isinstance(model(ids, return_dict=False), tuple)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    before, size = model(ids).logits, tokenizer.vocab_size
    assert torch.equal(again(ids).logits, before)
    model.resize_token_embeddings(size + 5)
    grown = model(ids).logits
    torch.testing.assert_close(grown[..., :size], before)
    assert grown.shape[-1] == size + 5


@pytest.mark.parametrize("encoding", ["tupe-a", "deberta"])
def test_too_long_an_input_names_both_lengths(own_code_model, encoding):
    """TUPE's positions end in the encoder, those of a mask decoder only before the head."""
    model = own_code_model(encoding)
    ids = torch.ones(1, SEQ_LENGTH + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{SEQ_LENGTH + 1} tokens.*{SEQ_LENGTH} positions"):
        model(ids)
    if encoding == "deberta":
        assert model.encoder(ids).last_hidden_state.shape[1] == SEQ_LENGTH + 1


def test_command_says_what_it_did_and_overwrite_replaces_exports_alone(tmp_path, tokenizer, offline, convert):
    from transformers import AutoModelForMaskedLM

    load, output = write_checkpoint(tmp_path / "run", tokenizer), tmp_path / "hf"
    first = convert("--load", load, "--output", output)
    assert first.returncode == 0, first.stderr
    again = convert("--load", load, "--output", output)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1 and "--overwrite" in again.stderr
    model = AutoModelForMaskedLM.from_pretrained(output, trust_remote_code=True)
    assert f"{model.num_parameters():,} parameters" in first.stdout
    assert "108 rows of vocabulary padding" in first.stdout and "iter_0000003" in first.stdout
    (output / "stale").write_text("x")
    export_checkpoint(load, output, overwrite=True)
    assert not (output / "stale").exists() and (output / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "hf_modules") == ["hf", "run", "vocab.txt"]
    refused("not a Hugging Face folder", export_checkpoint, load, load, overwrite=True)
    refused(f"holds no checkpoint: .*--from-hf {output} ", export_checkpoint, output, tmp_path / "again")
    assert (load / "latest").exists()


def test_what_cannot_be_exported_is_named_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    refused("no checkpoint", export_checkpoint, tmp_path / "missing", tmp_path / "hf")
    load = write_checkpoint(tmp_path / "run", tokenizer)
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr("megatron_ddrp.conversion.to_huggingface.write_tokenizer", full)
        refused("hf: No space left on device", export_checkpoint, load, tmp_path / "hf")
    state = read_state(load / "iter_0000003")
    state["config"]["model"]["position_encoding"] = "spiral"
    write_state(load / "iter_0000003", state)
    refused("'spiral'.*absolute, bert-r", export_checkpoint, load, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "vocab.txt"]


@pytest.mark.parametrize("objective", ["electra", "rtd"])
@torch.no_grad()
def test_a_run_goes_on_from_an_exported_discriminator(tmp_path, tokenizer, offline, objective):
    """Its generator's mask decoder and its lack of segments come back, and head and layers are those of before; RTD's
    one table becomes the generator's, beside a difference of 0."""
    load = write_checkpoint(tmp_path / "run", tokenizer, objective, deberta_emd=True, num_segments=0)
    export = export_checkpoint(load, tmp_path / "hf")
    assert not [name for name in export.weights if "generator" in name or "difference" in name]
    left = export.summary()
    assert "AutoModelForPreTraining" in left and "the generator" in left and "replaced-token head" in left
    summary = import_folder(tmp_path / "hf", tmp_path / "again").summary()
    for words in ("generator (drawn anew", "--deberta-emd", "--num-segments 0"):
        assert words in summary
    (before, _, _), (after, _, config) = load_model(load), load_model(tmp_path / "again")
    assert after.generator.mask_decoder is not None and after.embeddings.segment is None
    assert config.objective.objective == objective
    if objective == "rtd":
        assert "difference of the embeddings (0" in summary and not after.embeddings.difference.weight.any()
    ids, segments, mask = inputs = padded_pair_batch(tokenizer.vocab_size)
    hidden, again = (encoded(model, *inputs) for model in (before, after))
    logits = before.head.logits(hidden)[mask.bool()], after.head.logits(again)[mask.bool()]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    batch = Batch(ids, ids, mask, conftest.positions_of(mask), segments, mask)
    for folder in (export.source, tmp_path / "hf"):
        encoder = load_encoder(folder).fresh(0, torch.device("cpu")).eval()
        torch.testing.assert_close(encoder(batch)[mask.bool()], hidden[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.fixture(params=["absolute", "ddrp"])
def export(export_of, request):
    return export_of(request.param)


def test_every_file_but_code_and_card_has_a_sum_damaged_sums_are_refused_and_absent_ones_are_not(export):
    files = json.loads((export / SUMS).read_text(encoding="utf-8"))["files"]
    written = {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file() and path.suffix != ".py"}
    assert {*files, SUMS, CARD} == written and "1_Pooling/config.json" in files
    for content in ("{}", "[]", '{"files": {}}', '{"files": {"config.json": {"bytes": 1}}}', "{"):
        (export / SUMS).write_text(content, encoding="utf-8")
        refused(SUMS, READERS["glue"], export)
    (export / SUMS).unlink()
    READERS["glue"](export)


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_is_refused_by_every_reader_and_an_edited_card_is_no_damage(export, reader):
    (export / CARD).write_text("Trained by us.\n", encoding="utf-8")
    READERS[reader](export)
    (export / CARD).unlink()
    READERS[reader](export)
    for name in ("model.safetensors", "config.json", "vocab.txt", "tokenizer.json"):
        content = (export / name).read_bytes()
        flipped = bytearray(content)
        flipped[random.Random(name).randrange(len(content))] ^= 1
        (export / name).write_bytes(flipped)
        refused(f"{name} has the CRC-32 .* damaged or changed since its export", READERS[reader], export)
        (export / name).write_bytes(content)


def test_folders_around_the_current_one_are_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here", ".."):
        call = partial(refuse_output, Path(name), overwrite=True, replaceable=lambda _: True, kind="an export")
        assert refused("is or holds the current folder", call).exit_code == 2


LABELS = ("no", "maybe", "yes")
FORMS = dict(zip(("sequence", "tokens", "qa"), HEAD_FORMS, strict=True))
CLASSES = {
    **{"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
    **{"deberta": "Deberta", "deberta-v2": "DebertaV2", "electra": "Ddrp", "modernbert": "Ddrp"},
    **dict.fromkeys(("megatron_ddrp", "nomic_bert", "eurobert"), "Ddrp"),
}
"""Family that a masked LM leaves as → beginning of the class that its fine-tuned model is written as."""


def make_head(kind, problem_type=None):
    """Return a head of random weights for a model of width 32."""
    form, labels = FORMS[kind], () if kind == "qa" else LABELS
    head = TaskHead(32, len(labels) or 2, form.is_pooled, 0.1, form.output).eval()
    draw(head)
    return TunedHead(head, form, Labels(labels, problem_type))


PLAIN, OWN = (Case(FAMILIES[name], "masked-lm") for name in ("bert", "megatron_ddrp"))
KINDS = [(case, kind) for case in CASES for kind in FORMS if kind == "sequence" or case in (PLAIN, OWN)]


@pytest.mark.parametrize(("case", "kind"), KINDS, ids=str)
@torch.no_grad()
def test_every_family_under_a_head_of_each_kind_computes_what_transformers_classes_do(tmp_path, offline, case, kind):
    import transformers

    model, tokenizer, _ = load_model(write_run(case, tmp_path / "run"))
    head, folder = make_head(kind), tmp_path / "tuned"
    line = write_finetuned(model, tokenizer, head, folder)
    auto_class = f"AutoModelFor{FORMS[kind].name}"
    trust = ", trust_remote_code=True" if (folder / "modeling_ddrp.py").exists() else ""
    assert line == f'{auto_class}.from_pretrained("{folder}"{trust})'
    options = {"trust_remote_code": bool(trust), "output_loading_info": True}
    loaded, report = getattr(transformers, auto_class).from_pretrained(folder, **options)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    ids, segments = torch.where(mask > 0, ids, tokenizer.pad_id), segments * (model.config.num_segments > 1)
    types = {"token_type_ids": segments} if loaded.config.type_vocab_size > 1 else {}
    output = loaded.eval()(input_ids=ids, attention_mask=mask, **types)
    for name, scores in head.scores(encoded(model, ids, segments, mask)).items():
        compared = ... if FORMS[kind].is_pooled else mask.bool()
        torch.testing.assert_close(output[name][compared], scores[compared], atol=1e-5, rtol=1e-5)
    assert type(loaded).__name__ == f"{CLASSES[case.family.model_type]}For{FORMS[kind].name}"
    if kind == "qa":
        assert "id2label" not in json.loads((folder / "config.json").read_text())
    else:
        assert loaded.config.id2label == dict(enumerate(LABELS))
        assert loaded.config.label2id == {name: i for i, name in enumerate(LABELS)}


@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
@torch.no_grad()
def test_a_folder_comes_back_as_an_encoder_without_its_head(tmp_path, offline, tokenizer, encoding):
    model = load_model(write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding))[0]
    head = make_head("sequence", problem_type="single_label_classification")
    write_finetuned(model, tokenizer, head, tmp_path / "tuned", {"fine_tuning": {"max_seq_length": 16}})
    settings = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert settings["problem_type"] == "single_label_classification"
    assert settings["fine_tuning"] == {"max_seq_length": 16}
    encoder = load_encoder(tmp_path / "tuned")
    assert "missing: none; not used: 4 (" in encoder.origin
    assert all(name in encoder.origin for name in ("classifier.bias", "classifier.weight", "pooler.dense.bias"))
    batch = padded_pair_batch(tokenizer.vocab_size)
    again, _, _ = load_hugging_face(tmp_path / "tuned")
    torch.testing.assert_close(encoded(again, *batch), encoded(model, *batch), atol=0, rtol=0)
    assert encoder.tokenizer.pieces == tokenizer.pieces


def test_a_model_in_half_precision_is_left_as_it_is(tmp_path, offline, tokenizer):
    model = load_model(write_checkpoint(tmp_path / "run", tokenizer, objective="electra"))[0].train().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_finetuned(model, tokenizer, make_head("tokens"), tmp_path / "tuned")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.state_dict().values())


def test_a_folder_that_would_not_load_is_not_written(tmp_path, offline, tokenizer, monkeypatch):
    model, head = load_model(write_checkpoint(tmp_path / "run", tokenizer))[0], make_head("tokens")
    words = "exported model's logits differ from the checkpoint's"
    monkeypatch.setattr(TunedHead, "scores", lambda self, hidden: {"logits": hidden[..., :3]})
    refused(words, write_finetuned, model, tokenizer, head, tmp_path / "tuned")
    model.layers[0].attention.query.weight.data[0, 0] = torch.nan
    words = "layers.0.attention.query.weight is not finite because training diverged"
    refused(words, write_finetuned, model, tokenizer, head, tmp_path / "tuned")
    assert not list(tmp_path.glob("*tuned*"))
