"""RoBERTa, XLM-R and CamemBERT count positions from the id of padding: it is the padding of the tokenizer alone."""

import json

import pytest
from parity import Case, compare, example

from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.contract import exported_class
from megatron_ddrp.conversion.from_huggingface import import_folder, read_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import write_theirs

ROBERTAS = ("roberta", "xlm-roberta", "camembert")


@pytest.mark.parametrize("name", ROBERTAS)
@pytest.mark.parametrize("padding", [0, 2, 4, 17, 18, 10**6, None, -1, True, "1"], ids=str)
def test_a_roberta_whose_padding_is_not_its_tokenizers_is_refused(tmp_path, offline, name, padding):
    write_theirs(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": padding}))
    with pytest.raises(UserError, match=f"^{path}: pad_token_id is ") as error:
        read_folder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ROBERTAS)
@pytest.mark.parametrize("role", ["cls", "sep", "unk"])
def test_a_roberta_whose_padding_is_another_piece_of_a_text_is_refused(tmp_path, name, role):
    """transformers gives that piece the position of padding."""
    family = FAMILIES[name]
    _, tokenizer = example(Case(family, "masked-lm"), tmp_path)
    family.check_tokenizer("config.json", {"pad_token_id": tokenizer.pad_id}, tokenizer)
    setattr(tokenizer, f"{role}_id", tokenizer.pad_id)
    with pytest.raises(UserError, match="pad_token_id is 1, .*must be the padding and no other piece"):
        family.check_tokenizer("config.json", {"pad_token_id": tokenizer.pad_id}, tokenizer)


@pytest.mark.parametrize("name", ROBERTAS)
@pytest.mark.parametrize("padding", [0, 3, 10])
def test_an_export_is_padded_as_its_tokenizer_pads(tmp_path, offline, name, padding):
    pieces = ["<unk>", "<s>", "</s>", "<mask>", "red", "green", "blue", "cat", "dog", "the"]
    pieces.insert(padding, "<pad>")
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tmp_path / "vocab.txt")
    write_theirs(name, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "start", tokenizer=tokenizer)
    export_checkpoint(tmp_path / "start", tmp_path / "again", family_name=name)
    settings = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (settings["pad_token_id"], settings["max_position_embeddings"]) == (padding, 24 + padding + 1)
    theirs = exported_class(tmp_path / "again", settings["architectures"][0]).from_pretrained(tmp_path / "again").eval()
    assert max(compare(theirs, read_folder(tmp_path / "again").model.eval(), padding).all) < 1e-4


@pytest.mark.parametrize(("name", "told"), [*((name, True) for name in ROBERTAS), ("bert", False)])
def test_a_folder_without_a_tokenizer_names_its_padding(tmp_path, offline, name, told):
    write_theirs(name, tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").unlink()
    summary = import_folder(tmp_path / "hf", tmp_path / "start").summary()
    assert ("; its padding must have the id 1\n" in summary) == told and "give the model's own" in summary


@pytest.mark.parametrize("name", ["bert", "electra", "deberta", "deberta-v2", "modernbert"])
@pytest.mark.parametrize("padding", [None, 7])
def test_other_families_count_positions_without_the_padding(tmp_path, offline, name, padding):
    theirs, tokenizer = write_theirs(name, tmp_path, pad_token_id=padding)
    assert max(compare(theirs, read_folder(tmp_path).model.eval(), tokenizer.pad_id).all) < 1e-4
