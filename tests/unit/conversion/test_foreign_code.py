"""A folder's code is never run, whatever its files ask for and whatever stands on standard input."""

import io
import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_ddrp.conversion.families.contract import SUMS
from megatron_ddrp.conversion.from_huggingface import import_folder, load_hugging_face
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.text_encoder import load_encoder
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import READERS, write_checkpoint

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertModel, BertTokenizer
class EvilConfig(BertConfig):
    model_type = "evil"
class EvilModel(BertModel):
    config_class = EvilConfig
class EvilTokenizer(BertTokenizer):
    pass
"""
AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that evil code leaves; `y` answers every question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    return tmp_path / "evil-code-ran"


@pytest.fixture
def export(tmp_path, tokenizer, offline, marker):
    """Encoding → an exported folder with evil.py in it."""

    def make(encoding):
        folder = tmp_path / "hf"
        export_checkpoint(write_checkpoint(tmp_path / "run", tokenizer, position_encoding=encoding), folder)
        (folder / SUMS).unlink()  # no sum shall refuse what is to be refused as code
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
        return folder

    return make


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "evil", "auto_map": AUTO_MAP}),
        ("config.json", {"auto_map": AUTO_MAP}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}),
    ],
    ids=["a model of its own", "a known model", "a kernel", "a tokenizer"],
)
def test_folders_with_code_are_refused(export, marker, reader, file, changes):
    folder = export("absolute")
    change(folder / file, **changes)
    with pytest.raises(UserError, match="code of a folder is never run here") as refused:
        READERS[reader](folder)
    assert str(folder / file) in str(refused.value)
    assert not marker.exists()


@pytest.mark.parametrize("reader", ["analyze", "glue"])
def test_our_exports_are_read_by_our_own_classes(export, marker, reader):
    """Whatever lies under the names of the model code that travels with them."""
    folder = export("ddrp")
    for path in folder.glob("*.py"):
        path.write_text(EVIL.format(marker=str(marker)))
    change(folder / "config.json", auto_map=AUTO_MAP)
    READERS[reader](folder)
    assert not marker.exists()


def test_a_tokenizer_folder_is_read_as_data(export, marker):
    folder = export("absolute")
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]})
    assert build_tokenizer("HuggingFace", tokenizer_model=folder).vocab_size == 20
    assert not marker.exists()


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("broken", [False, True], ids=["with code", "damaged"])
def test_a_pickle_is_refused_without_advice_to_load_it_unsafely(export, marker, reader, broken):
    folder = export("absolute")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(weights if broken else weights | {"more": Malicious(marker)}, path)
    if broken:
        path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="not a plain file of tensors.*save it as model.safetensors") as refused:
        READERS[reader](folder)
    assert "weights_only" not in str(refused.value) and "trust" not in str(refused.value)
    assert not marker.exists()


ABSURD = [
    {"hidden_size": 10**12}, {"hidden_size": 2**20}, {"hidden_size": -32}, {"hidden_size": "abc"}, {"hidden_size": 0},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 200}, {"num_attention_heads": 0}, {"num_attention_heads": 7},
    {"intermediate_size": 2**21}, {"vocab_size": 10**12}, {"vocab_size": 2**21, "hidden_size": 2**21},
    {"max_position_embeddings": 2**22}, {"max_position_embeddings": 10**10},
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("changes", ABSURD, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))
def test_absurd_sizes_are_refused_before_anything_is_allocated(export, little_room, reader, changes):
    folder = export("absolute")
    change(folder / "config.json", **changes)
    with pytest.raises(UserError) as refused:
        READERS[reader](folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_a_small_tokenizer_beside_a_large_vocabulary_is_warned_of(tmp_path, export, capsys, recwarn):
    import transformers

    folder = export("absolute")
    config = transformers.BertConfig.from_pretrained(folder)
    config.vocab_size = 20 + 255
    for warned in (False, True):
        transformers.BertForMaskedLM(config).save_pretrained(folder)
        imported = import_folder(folder, tmp_path / f"imported{warned}")
        load_hugging_face(folder)
        encoder = load_encoder(folder)
        told = [imported.warning, capsys.readouterr().err, encoder._encoder.origin, *(str(w.message) for w in recwarn)]
        line = f"{folder}: its tokenizer has 20 pieces but its model embeds 276: is it the tokenizer of"
        assert [line in text for text in told] == ([True] * 4 if warned else [False] * 3)
        assert len(encoder.fill_mask("red [MASK]", top_k=30)[0]) == 20
        config.vocab_size += 1
