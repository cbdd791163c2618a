"""The weights of a folder in every form that people store, and folders that lack some or have too many."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from megatron_ddrp.conversion.from_huggingface import load_hugging_face
from megatron_ddrp.conversion.weight_files import read_weights
from megatron_ddrp.encoders.encoder import NoMaskedLM, load_encoder
from megatron_ddrp.encoders.text_encoder import TextEncoder
from tests.refusals import refused
from tests.unit.conversion.conftest import DEBERTA, READERS, SAFE, put, set_keys, stored, write_folder

pytestmark = pytest.mark.usefixtures("few_probes")

FAMILIES = ("Bert", "Roberta", "Camembert", "XLMRoberta", "Electra", "Deberta", "DebertaV2", "ModernBert")
OTHERS = ("DistilBert", "Albert", "MPNet")
"""Families that transformers alone reads."""
OF_V2 = {"max_relative_positions": -1, "position_buckets": 8, "share_att_key": True}
OF_V2 |= {"norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
SETTINGS = {"Electra": {"embedding_size": 16}, "Deberta": DEBERTA, "DebertaV2": DEBERTA | OF_V2}
EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")
OUTPUTS = ("decoder.weight", "generator_lm_head.weight", "vocab_projector.weight", "lm_head.weight")


def write(folder, vocab, family, **more):
    """A folder of a family whose tensors lie in one file."""
    return write_folder(folder, vocab, f"{family}ForMaskedLM", **SETTINGS.get(family, {}), **more)


def renamed(change):
    """Store every tensor under another name."""
    return stored(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def behind(prefix):
    """Store every tensor under its name behind another one."""
    return renamed(lambda name: f"{prefix}.{name}")


def tied_as(kept, dropped):
    """Store a tied matrix under names that end in `kept`, and not under those that end in `dropped`."""

    def change(folder, model):
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert any(name.endswith(kept) for name in tensors)
        save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(dropped)}, folder / SAFE)

    return change


def shard(folder, _, name=SAFE, write=save_file):
    """Split the weights over three files and an index, as transformers names them."""
    tensors = load_file(folder / SAFE)
    (folder / SAFE).unlink()
    stem, _, ending = name.rpartition(".")
    places = {weight: f"{stem}-0000{1 + n % 3}-of-00003.{ending}" for n, weight in enumerate(sorted(tensors))}
    for file in set(places.values()):
        write({weight: tensors[weight] for weight in places if places[weight] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / f"{name}.index.json").write_text(json.dumps(index))


def change_index(change):
    """Split the weights, and put `change(places)` in place of the index; `places` names the file of every weight."""

    def apply(folder, _=None):
        shard(folder, None)
        path = folder / f"{SAFE}.index.json"
        path.write_text(json.dumps(change(json.loads(path.read_text())["weight_map"])))

    return apply


def shards_in_a_folder(folder, _):
    change_index(lambda places: {"weight_map": {name: f"parts/{file}" for name, file in places.items()}})(folder)
    (folder / "parts").mkdir()
    for file in folder.glob("model-*"):
        file.rename(folder / "parts" / file.name)


TIED = {
    "save_model": lambda folder, model: save_model(model, str(folder / SAFE)),
    "decoder": tied_as(OUTPUTS, EMBEDDINGS),
    "embedding": tied_as(EMBEDDINGS, OUTPUTS),
    "both": tied_as(OUTPUTS, "none"),
}
"""Names of the tied matrix, which are each family's own."""
FORMS = TIED | {
    **{name: behind(name) for name in ("module._orig_mod", "student", "_forward_module.module.model")},
    "compiled layers": renamed(lambda name: name.replace(".0.", ".0._orig_mod.", 1)),
    "fsdp": renamed(lambda name: f"_fsdp_wrapped_module.{name}".replace(".0.", ".0._checkpoint_wrapped_module.", 1)),
    "shards": shard,
    "shards of pickles": lambda folder, model: shard(folder, model, "pytorch_model.bin", torch.save),
    "shards in a folder": shards_in_a_folder,
    "shards with more": change_index(
        lambda places: {"weight_map": {name: file for name, file in places.items() if name != min(places)}}
    ),
}


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_every_form_of_the_same_weights_is_the_same_encoder(tmp_path, hf, vocab, family):
    model = write(hf, vocab, family)
    expected = load_encoder(hf).fingerprint, load_encoder(hf, masked_lm=True).fingerprint
    ours = load_hugging_face(hf)[0].state_dict() if family in FAMILIES else {}
    for name, change in (FORMS if family == "Bert" else TIED).items():
        folder = shutil.copytree(hf, tmp_path / name)
        change(folder, model)
        assert (load_encoder(folder).fingerprint, load_encoder(folder, masked_lm=True).fingerprint) == expected, name
        if ours:
            again = load_hugging_face(folder)[0].state_dict()
            assert all(torch.equal(tensor, again[key]) for key, tensor in ours.items()), name


def point(name):
    """Let the index name the file `name` for one weight."""
    return change_index(lambda places: {"weight_map": places | {min(places): name}})


def damage_a_shard(folder):
    shard(folder, None)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(b"x" * 40)
    return path


def with_other_encoder(tensors):
    """Return a second encoder too, under names without the prefix of the first."""
    return tensors | {name.removeprefix("bert."): t + 1 for name, t in tensors.items() if name.startswith("bert.")}


def drop(folder, part):
    tensors = load_file(folder / SAFE)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / SAFE)


DISTANCES = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
BROKEN = {
    "gone": (lambda hf: damage_a_shard(hf).unlink(), "names 'model-00002-of-00003.safetensors', which is missing"),
    "shard damaged": (damage_a_shard, "model-00002-of-00003.safetensors: cannot be read"),
    "elsewhere": (point("model-00003-of-00003.safetensors"), "it lacks bert.*, which model.*index.json names there"),
    "above": (point("../model.safetensors"), "names the file '../model.safetensors'; expected a file in its own"),
    "absolute": (point("/etc/passwd"), "names the file '/etc/passwd'; expected a file in its own folder"),
    "nothing": (point(""), "expected a file in its own folder"),
    "NUL": (point("x\0"), "which is missing"),
    "no map": (change_index(lambda places: {"metadata": {}}), "it has no weight_map"),
    "empty map": (change_index(lambda places: {"weight_map": {}}), "it has no weight_map"),
    "a list": (change_index(lambda places: list(places)), "expected a JSON object"),
    "two values": (
        stored(lambda these: these | {f"module.{min(these)}": these[min(these)] + 1}),
        "occurs under two names, with different values",
    ),
    "two encoders": (stored(with_other_encoder), "have different values|occurs under two names, with different values"),
    "int8": (
        stored(lambda these: {name: t.to(torch.int8) if "query.weight" in name else t for name, t in these.items()}),
        "query.weight is quantized, torch.int8; save the model in a flo",
    ),
    "another file": (set_keys(transformers_weights="other"), "transformers_weights is 'other'; rename that file to m"),
    "a map too many": (put(DISTANCES, torch.zeros(9, 8)), f"no place for the weight {DISTANCES}, nor for 0 more"),
    "fewer layers": (set_keys(num_hidden_layers=1), "no place .*layer.1.*, nor for 15 m"),
    "more layers": (set_keys(num_hidden_layers=3), "missing"),
    "narrower": (set_keys(intermediate_size=40), "config.json requires"),
}
"""Fault of a folder → a function that breaks one, and the words of the line."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_do_not_fit_are_refused_in_one_line(hf, vocab, kind, reader):
    write(hf, vocab, "Bert")
    change, words = BROKEN[kind]
    change(hf)
    assert refused(words, READERS[reader], hf).exit_code == 1


def test_a_type_that_torch_only_stores_is_refused(tmp_path):
    header = json.dumps({"a.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    refused(r"cannot be read: torch stores torch\.float4\w+ but computes nothing with it", read_weights, tmp_path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("part", ["word_emb", "position_emb", "embeddings.LayerNorm", "self.key.weight", "layer.1."])
def test_missing_weights_of_the_encoder_are_refused(hf, vocab, part, reader):
    write(hf, vocab, "Bert")
    drop(hf, part)
    assert refused("missing|no word embedding", READERS[reader], hf).exit_code == 1
    assert not isinstance(refused("of the encoder are missing", load_encoder, hf, masked_lm=True), NoMaskedLM)
    assert "all weights are new and random" in load_encoder(hf, random_init=True).origin


@pytest.mark.parametrize(
    ("family", "settings"), [("Bert", {"tie_word_embeddings": False}), ("EuroBert", {"num_key_value_heads": 4})]
)
def test_an_output_matrix_of_its_own_is_no_word_embedding(hf, vocab, family, settings):
    model = write(hf, vocab, family, **settings)
    tied_as(OUTPUTS, EMBEDDINGS)(hf, model)
    for masked_lm in (False, True):
        refused(r"1 \(.*embed.*\) of the encoder are missing", load_encoder, hf, masked_lm=masked_lm)


def test_a_masked_lm_needs_no_pooler(hf, vocab):
    write(hf, vocab, "BigBird", attention_type="original_full")
    with_pooler = load_encoder(hf), load_encoder(hf, masked_lm=True)
    drop(hf, ".pooler.")
    without = load_encoder(hf), load_encoder(hf, masked_lm=True)
    assert [encoder.fingerprint for encoder in without] == [encoder.fingerprint for encoder in with_pooler]
    assert len(TextEncoder(without[0], torch.device("cpu"), torch.float32, ()).pool("red cat").shape) == 1


def test_heads_and_poolers_are_not_missed_but_a_bias_of_a_masked_lm_is(tmp_path, hf, vocab):
    for name, class_name in {"pooler": "BertModel", "none": "BertForTokenClassification"}.items():
        write_folder(tmp_path / name, vocab, class_name)
        for read in READERS.values():
            read(tmp_path / name)
    with pytest.raises(NoMaskedLM, match="no masked-LM head; the folder lacks"):
        load_encoder(tmp_path / "pooler", masked_lm=True)
    write(hf, vocab, "ModernBert")
    drop(hf, "decoder.bias")
    refused("the weight for head.decoder.bias is missing", READERS["convert"], hf)


BESIDE = [
    ("Bert", "bert.embeddings.position_ids", torch.arange(24)[None]),
    ("Roberta", "roberta.embeddings.token_type_ids", torch.zeros(1, 24).long()),
    ("DebertaV2", "deberta.embeddings.position_embeddings.weight", torch.zeros(24, 32)),
    ("Roberta", "roberta.pooler.dense.bias", torch.zeros(32)),
    ("Bert", "cls.seq_relationship.weight", torch.zeros(2, 32)),
]


@pytest.mark.parametrize(("family", "name", "tensor"), BESIDE)
def test_what_released_folders_have_beside_the_encoder_is_left_out(hf, vocab, family, name, tensor):
    write(hf, vocab, family)
    put(name, tensor)(hf)
    for read in READERS.values():
        read(hf)
