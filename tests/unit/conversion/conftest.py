"""Tiny checkpoint folders with random weights, written as training writes them, and what their models compute."""

import json
import resource
import shutil
import sys
from functools import cache, partial

import pytest
import torch
from parity import Case, draw, example
from safetensors.torch import load_file, save_file

from megatron_ddrp import checkpoint
from megatron_ddrp.commands import convert as command
from megatron_ddrp.config import Config, ObjectiveConfig, encoding_class
from megatron_ddrp.conversion import tokenizer_files
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.contract import exported_class
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.atomic import file_facts
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.model import build_model

BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["red", "green", "blue", "cat", "dog", "bird", "run", "sing", "##s", "##ing", "é", "Cat", "the", ",", "."]
SEQ_LENGTH = 24
SAFE = "model.safetensors"
SIZES = {
    **{"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": SEQ_LENGTH, "hidden_dropout_prob": 0.0, "pad_token_id": 0},
}
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}


def write_checkpoint(folder, tokenizer, objective="mth", **model_settings):
    """A `--save` folder with one checkpoint of a random tiny model."""
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ_LENGTH}
    settings |= {"relative_distance": 4, "vocab_size": tokenizer.vocab_size} | model_settings
    if encoding_class(settings.get("position_encoding", "ddrp")).relative_distance is None:
        settings["relative_distance"] = None
    config = Config(objective=ObjectiveConfig(objective=objective)).replace(model=settings)
    torch.manual_seed(1)
    model = build_model(config.model, objective=config.objective)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)  # biases, LayerNorms and tables must all act
    path = folder / checkpoint.tag(3)
    path.mkdir(parents=True)
    weights = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    files = {checkpoint.WEIGHTS: checkpoint.save_weights(weights, path)}
    checkpoint.write_state(path, {"iteration": 3, "files": files, "config": config.to_dict()})
    tokenizer.save(folder / checkpoint.TOKENIZER)
    checkpoint.mark_latest(folder, path.name)
    return folder


def change_json(path, **values):
    """Put other values into a JSON file."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def set_keys(**values):
    """Return a function of a folder that puts other values into its config.json."""
    return lambda folder: change_json(folder / "config.json", **values)


def stored(change):
    """Return a function of a folder that stores `change(tensors)` in place of its tensors."""
    return lambda folder, _=None: save_file(change(load_file(folder / SAFE)), folder / SAFE)


def put(name, tensor):
    """Return a function of a folder that stores a tensor under a name."""
    return stored(lambda tensors: tensors | {name: tensor})


def seal_again(weights):
    """Write the sum of changed weights, a file of a checkpoint, into its state.json."""
    state = checkpoint.read_state(weights.parent)
    checkpoint.write_state(weights.parent, state | {"files": {weights.name: file_facts(weights)}})


def padded_pair_batch(vocab_size):
    """(ids, segments, mask), three rows of lengths up to five times the relative distance."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (3, SEQ_LENGTH), generator=generator)
    mask = (torch.arange(SEQ_LENGTH) < torch.tensor([[SEQ_LENGTH], [13], [2]])).long()
    segments = (torch.arange(SEQ_LENGTH) >= torch.tensor([[9], [5], [1]])).long() * mask
    return ids * mask, segments, mask


def positions_of(mask):
    """Return the position of every token, 0 for padding."""
    return torch.arange(mask.shape[1]).expand_as(mask) * mask


def encoded(model, ids, segments, mask):
    """Return the model's last hidden states, `[batch, seq, hidden]`."""
    return model.encode(ids, segments, mask, positions_of(mask))


@torch.no_grad()
def ours(model, ids, segments, mask):
    """(hidden states after the embeddings and each layer, logits of all tokens)."""
    labels = torch.where(mask.bool(), ids, IGNORED_LABEL)
    batch = Batch(ids, labels, mask, positions_of(mask), segments, mask)
    logits = torch.zeros(*ids.shape, model.config.vocab_size)
    logits[mask.bool()] = model.predict(batch)
    return [layer.hidden for layer in layer_states(model, batch, with_heads=False)], logits


def wordpiece(path, pieces, kind="BertWordPieceCase"):
    """Write a vocab.txt of these pieces and return its tokenizer."""
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return build_tokenizer(kind, path)


def write_folder(folder, tokenizer, model_class, **settings):
    """A Hugging Face folder with a random model under whose logits every weight acts, and a vocab.txt."""
    import transformers

    model = getattr(transformers, model_class)
    model = model(model.config_class(**SIZES | settings)).eval()
    draw(model)
    model.save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "vocab.txt")
    return model


def tokenizer_in(folder):
    """Write the words' vocab.txt into a folder and return its tokenizer."""
    return wordpiece(folder / "vocab.txt", [*BERT_SPECIALS, *WORDS], "BertWordPieceLowerCase")


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_in(tmp_path)


@pytest.fixture
def vocab(tmp_path, tokenizer, offline):
    return tmp_path / "vocab.txt"


@pytest.fixture
def hf(tmp_path):
    return tmp_path / "hf"


@pytest.fixture(scope="session")
def made_exports(tmp_path_factory):
    """Folders with a run and its export by the encoding of the model; `export_of` copies them."""

    @cache
    def make(encoding):
        folder = tmp_path_factory.mktemp("made")
        run = write_checkpoint(folder / "run", tokenizer_in(folder), position_encoding=encoding)
        export_checkpoint(run, folder / "hf")
        return folder

    return make


@pytest.fixture
def export_of(tmp_path, made_exports):
    """Encoding → a copy of a run's export, in a folder `hf`."""

    def copy(encoding):
        source = made_exports(encoding) / "hf"
        torch.manual_seed(1)  # so that a test's own draws depend on no other test
        return shutil.copytree(source, tmp_path / "hf")

    return copy


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """transformers without network, its cache of model code in this test's own folder."""
    pytest.importorskip("transformers")
    from transformers import dynamic_module_utils

    modules = str(tmp_path / "hf_modules")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", modules)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # the package of an earlier test's cache


@pytest.fixture
def convert(run_tool, monkeypatch):
    """Words of a command line → what `megatron-ddrp convert` leaves, run in this process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its handlers
    return partial(run_tool, command)


@pytest.fixture
def few_probes(monkeypatch):
    """Two texts instead of 250 at which ours and transformers' tokenizer are compared: for tests about other files."""
    monkeypatch.setattr(tokenizer_files, "_probes", lambda *_: iter(["red cat", "x"]))


def import_and_forget(folder):
    import_folder(folder, folder.parent / "imported")
    shutil.rmtree(folder.parent / "imported")


READERS = {"convert": import_and_forget, "glue": load_encoder}
"""Command → reader of a folder; analyses read it by `read_folder`, as an import does."""


@pytest.fixture
def little_room():
    """Less address space than an absurd size wants: a reader may add 8 GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def write_theirs(name, folder, head="masked-lm", **changes):
    """A folder with a random tiny model of a family and changed keys, as its config.json would say; its tokenizer."""
    case = Case(FAMILIES[name], head)
    config, tokenizer = example(case, folder)
    settings = case.family.folder_settings(config, case.head, tokenizer) | changes
    settings = {key: value for key, value in settings.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))
    model_class = exported_class(folder, settings["architectures"][0])
    model = model_class(model_class.config_class.from_pretrained(folder))
    draw(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    return model_class.from_pretrained(folder).eval(), tokenizer
