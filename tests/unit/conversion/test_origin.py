"""An export is what its origin was: a sentence encoder's modules, its base model, its licence and its head."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_ddrp import checkpoint
from megatron_ddrp.conversion import to_huggingface
from megatron_ddrp.conversion.families.contract import CARD
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.origin import Origin, read_modules
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.engine.checkpoint import Progress
from tests.refusals import refused
from tests.unit.conversion.conftest import (
    SAFE,
    padded_pair_batch,
    set_keys,
    stored,
    write_checkpoint,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("few_probes")

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."
MODULES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{OLD}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{OLD}Normalize"},
    ],
    "sentence_bert_config.json": {"max_seq_length": 17, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "find: "}},
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
}


def write_modules(folder, **changes):
    """Put the modules of a sentence encoder into a folder, and the card of one."""
    (folder / "1_Pooling").mkdir()
    for name, content in (MODULES | changes).items():
        (folder / name).write_text(json.dumps(content))
    (folder / CARD).write_text("---\nlicense: apache-2.0\n---\n# Sentences\n")


def vectors(model, folder, ids, mask):
    """Return what the modules of a folder make of the last hidden states, number by number."""
    modules, _ = read_modules(folder)
    assert modules["1_Pooling/config.json"]["pooling_mode_mean_tokens"]
    rows = []
    with torch.no_grad():
        hidden = model(ids, attention_mask=mask).last_hidden_state.double()
    for states, length in zip(hidden, mask.sum(1), strict=True):
        mean = [sum(float(state[place]) for state in states[:length]) / int(length) for place in range(32)]
        norm = sum(value * value for value in mean) ** 0.5 if len(modules["modules.json"]) == 3 else 1.0
        rows.append([value / norm for value in mean])
    return torch.tensor(rows)


@pytest.fixture
def encoder(hf, vocab):
    """A sentence encoder of the usual kind: a bare BERT, the mean of its states, length 1."""
    model = write_folder(hf, vocab, "BertModel")
    write_modules(hf)
    return model


def test_a_sentence_encoder_leaves_as_it_came(tmp_path, hf, encoder):
    from transformers import AutoModel

    imported = import_folder(hf, tmp_path / "start")
    assert "sentences:   mean pooling, vectors of length 1, rows of up to 17 pieces" in imported.summary()
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "start"))
    assert Origin(**Progress.from_state(state).origin) == Origin("hf", "apache-2.0", False, MODULES)
    export = export_checkpoint(tmp_path / "start", tmp_path / "out")
    assert "sentences:   mean pooling, vectors of length 1" in export.summary()
    assert "the head, which the folder of its origin lacks too" in export.summary()
    assert read_modules(tmp_path / "out") == (MODULES, [])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertModel"]
    theirs, ours = load_file(hf / SAFE), load_file(tmp_path / "out" / SAFE)
    assert ours.keys() == {name for name in theirs if not name.startswith("pooler.")}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    ids, _, mask = padded_pair_batch(20)
    again = vectors(AutoModel.from_pretrained(tmp_path / "out"), tmp_path / "out", ids, mask)
    torch.testing.assert_close(again, vectors(encoder, hf, ids, mask))
    torch.testing.assert_close(again.norm(dim=1), torch.ones(3))
    card = (tmp_path / "out" / CARD).read_text()
    assert "Base model: hf, under the licence apache-2.0." in card and "# license: unknown" in card
    assert "pipeline_tag: sentence-similarity" in card and 'SentenceTransformer("USER/out")' in card
    assert "A sentence encoder, without a head" in card and "fill-mask" not in card


@pytest.mark.parametrize("kind", ["RobertaModel", "ModernBertModel", "own"])
def test_other_families_leave_without_a_head_too(tmp_path, hf, vocab, tokenizer, kind):
    if kind == "own":
        run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="ddrp", deberta_emd=True)
        export_checkpoint(run, hf)
        (hf / "export_sums.json").unlink()
        stored(lambda tensors: {name: t for name, t in tensors.items() if name.startswith("encoder.")})(hf)
        set_keys(deberta_emd=False)(hf)
    else:
        settings = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
        write_folder(hf, vocab, kind, **settings, **({"type_vocab_size": 1} if "Rob" in kind else {}))
        write_modules(hf)
    import_folder(hf, tmp_path / "start")
    export = export_checkpoint(tmp_path / "start", tmp_path / "out", family_name="roberta" if "Rob" in kind else None)
    assert export.family.classes(export.head) == (f"{'Ddrp' if kind == 'own' else kind[:-5]}Model", "AutoModel")
    theirs, ours = load_file(hf / SAFE), load_file(tmp_path / "out" / SAFE)
    prefix = "encoder." if kind == "own" else ""
    assert {name.removeprefix(prefix) for name in theirs if "pooler" not in name} == ours.keys()
    assert import_folder(tmp_path / "out", tmp_path / "again").origin.is_bare


def test_any_other_export_says_how_to_pool_and_keeps_its_head(tmp_path, tokenizer, offline):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="absolute")
    export = export_checkpoint(run, tmp_path / "out")
    assert "sentences:   mean pooling, vectors of any length, rows of up to 24 pieces" in export.summary()
    import_folder(tmp_path / "out", tmp_path / "start")
    again = export_checkpoint(tmp_path / "start", tmp_path / "again")
    assert again.head == "masked-lm" and read_modules(tmp_path / "again") == read_modules(tmp_path / "out")


def types(*kinds):
    return [{"path": str(number) * (number > 0), "type": kind} for number, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("modules", "kept", "left_out"),
    [
        (types(f"{OLD}Transformer", f"{NEW}Pooling", f"{OLD}Dense", f"{OLD}Normalize"), [0, 1, 3], ["2"]),
        (types(f"{OLD}Transformer", "custom_st.Pooling"), [0], ["1"]),
        (types("custom_st.Transformer", f"{OLD}Pooling"), None, ["Transformer", "1"]),
        ([], None, []),
    ],
    ids=["weights", "code", "code of the encoder", "nothing"],
)
def test_modules_with_weights_or_code_are_left_out_by_name(tmp_path, modules, kept, left_out):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    files, without = read_modules(tmp_path)
    assert files.get("modules.json") == (None if kept is None else [modules[number] for number in kept])
    assert without == left_out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "modules.json: expected a list"),
        ('["x"]', "modules.json: expected an object"),
        ('[{"path": ""}]', "modules.json: type is missing"),
        (
            json.dumps([{"path": "../x", "type": f"{OLD}Transformer"}]),
            r"a path is '\.\./x', expected the name of a fol",
        ),
        (json.dumps([{"path": ".", "type": f"{OLD}Transformer"}]), r"a path is '\.', expected"),
        ("[", "modules.json: not JSON"),
    ],
)
def test_damaged_modules_are_refused_before_anything_is_written(tmp_path, hf, encoder, content, words):
    (hf / "modules.json").write_text(content)
    refused(words, import_folder, hf, tmp_path / "start")
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize(
    ("card", "license"), [("", None), ("# no metadata", None), ("---\n[\n---", None), ("---\n- mit\n---", None)]
)
def test_a_licence_that_no_card_states_is_none(tmp_path, hf, vocab, card, license):
    write_folder(hf, vocab, "BertModel")
    (hf / CARD).write_text(card)
    assert import_folder(hf, tmp_path / "start").origin.license is license


@pytest.mark.parametrize(
    ("has_head", "iteration", "losses", "is_offered"),
    [(True, 0, {}, True), (False, 0, {}, False), (False, 3, {}, False)]
    + [(False, 3, {"lm_loss": loss}, offered) for loss, offered in ((6.9, True), (7.0, False))]
    + [(False, 3, {"lm_loss": 6.0, "valid_lm_loss": 7.5}, False)],
)
def test_fill_mask_is_offered_only_if_the_head_was_trained(
    tmp_path, hf, vocab, monkeypatch, has_head, iteration, losses, is_offered
):
    monkeypatch.setattr(to_huggingface, "check_export", lambda *_: "not checked")
    write_folder(hf, vocab, "BertForMaskedLM" if has_head else "BertModel")
    import_folder(hf, tmp_path / "run")
    run = tmp_path / "run"
    path = checkpoint.newest(run)
    if iteration:
        checkpoint.write_state(path, checkpoint.read_state(path) | {"iteration": iteration, "weights_only": False})
        path = path.rename(run / checkpoint.tag(iteration))
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": iteration, **losses}) + "\n")
        (run / "unigram.json").write_text('{"unigram_loss": 7.0}')
    export_checkpoint(path, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert ("pipeline_tag: fill-mask" in card) == ("mask_token" in card) == is_offered
    assert ("a masked-LM head that has learned too little to be used" in card) != is_offered


def test_the_card_says_how_long_the_rows_of_training_were(tmp_path, tokenizer, offline):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="absolute")
    path = checkpoint.newest(run)
    state = checkpoint.read_state(path)
    state["config"]["training"] |= {"seq_length_phases": ["8:0.2", "16:0.5"], "train_iters": 10}
    checkpoint.write_state(path, state)  # step 3 of 10: rows of 16
    export = export_checkpoint(run, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert "of up to 16 tokens |" in card and "The model has seen no text of more than 16 pieces." in card
    assert "rows of up to 16 pieces" in export.summary() and "| longest text | 24 pieces |" in card
