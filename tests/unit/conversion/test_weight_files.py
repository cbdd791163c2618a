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
from tests.unit.conversion.conftest import DEBERTA, READERS, SAFE, set_keys, stored, write_folder

pytestmark = pytest.mark.usefixtures("few_probes")

PICKLE = "pytorch_model.bin"
PADDED, OWN_MATRIX = {"pad_token_id": 0}, {"tie_word_embeddings": False}
OF_V2 = {"max_relative_positions": -1, "position_buckets": 8, "share_att_key": True}
OF_V2 |= {"norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
FAMILIES = {
    **{"bert": ("Bert", {}), "roberta": ("Roberta", PADDED), "camembert": ("Camembert", PADDED)},
    **{"xlm-roberta": ("XLMRoberta", PADDED), "electra": ("Electra", {"embedding_size": 16})},
    **{"deberta": ("Deberta", DEBERTA), "deberta-v2": ("DebertaV2", DEBERTA | OF_V2)},
    **{"modernbert": ("ModernBert", PADDED)},
}
UNTIED = {
    **{"bert": ("Bert", OWN_MATRIX), "roberta": ("Roberta", PADDED | OWN_MATRIX), "electra": ("Electra", OWN_MATRIX)},
    **{
        "modernbert": ("ModernBert", PADDED | OWN_MATRIX),
        "eurobert": ("EuroBert", PADDED | {"num_key_value_heads": 4}),
    },
}
"""Families with an output matrix of its own."""
POOLED = {"bigbird": ("BigBird", {"attention_type": "original_full"}), "fnet": ("FNet", {})}
POOLED |= {"squeezebert": ("SqueezeBert", {"embedding_size": 32})}
"""Families with a pooler in their masked LM."""
OTHERS = {"distilbert": ("DistilBert", {}), "albert": ("Albert", {}), "mpnet": ("MPNet", PADDED)}
"""Families that transformers alone reads."""
EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")
OUTPUTS = ("decoder.weight", "generator_lm_head.weight", "vocab_projector.weight", "lm_head.weight")


def write(folder, vocab, family, table=FAMILIES | OTHERS | POOLED):
    """A folder of a family whose tensors lie in one file."""
    class_name, settings = table[family]
    return write_folder(folder, vocab, f"{class_name}ForMaskedLM", **settings)


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


def decoder_behind_wrappers(folder, model):
    tied_as(OUTPUTS, EMBEDDINGS)(folder, model)
    behind("_orig_mod.module")(folder, model)


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


def index_changed(folder, change):
    """Split the weights, and change the index as a text."""
    shard(folder, None)
    path = folder / f"{SAFE}.index.json"
    path.write_text(change(path.read_text()))


def shards_in_a_folder(folder, _):
    index_changed(folder, lambda text: text.replace('"model-', '"parts/model-'))
    (folder / "parts").mkdir()
    for file in folder.glob("model-*"):
        file.rename(folder / "parts" / file.name)


def change_index(change):
    """Put `change(places)` in place of the index; `places` names the file of every weight."""
    return lambda folder, _=None: index_changed(folder, lambda text: json.dumps(change(json.loads(text)["weight_map"])))


FORMS = {
    "save_model": lambda folder, model: save_model(model, str(folder / SAFE)),
    "decoder": tied_as(OUTPUTS, EMBEDDINGS),
    "embedding": tied_as(EMBEDDINGS, OUTPUTS),
    "both": tied_as(OUTPUTS, "none"),
    **{name: behind(name) for name in ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module")},
    **{name: behind(name) for name in ("model", "_forward_module.module.model", "student", "module.module")},
    "compiled layers": renamed(lambda name: name.replace(".0.", ".0._orig_mod.", 1)),
    "fsdp": renamed(lambda name: f"_fsdp_wrapped_module.{name}".replace(".0.", ".0._checkpoint_wrapped_module.", 1)),
    "decoder, wrapped": decoder_behind_wrappers,
    "shards": shard,
    "shards of pickles": lambda folder, model: shard(folder, model, PICKLE, torch.save),
    "shards in a folder": shards_in_a_folder,
    "shards with more": change_index(
        lambda places: {"weight_map": {name: file for name, file in places.items() if name != min(places)}}
    ),
}


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
def test_every_form_of_the_same_weights_is_the_same_encoder(tmp_path, hf, vocab, family):
    model = write(hf, vocab, family)
    expected = load_encoder(hf).fingerprint, load_encoder(hf, masked_lm=True).fingerprint
    ours = load_hugging_face(hf)[0].state_dict() if family in FAMILIES else {}
    for name, change in FORMS.items():
        folder = shutil.copytree(hf, tmp_path / name)
        change(folder, model)
        assert (load_encoder(folder).fingerprint, load_encoder(folder, masked_lm=True).fingerprint) == expected, name
        if ours:
            again = load_hugging_face(folder)[0].state_dict()
            assert all(torch.equal(tensor, again[key]) for key, tensor in ours.items()), name


def point(name):
    """Let the index name the file `name` for one weight."""
    return change_index(lambda places: {"weight_map": places | {min(places): name}})


def lose_a_shard(folder):
    damage_a_shard(folder).unlink()


def damage_a_shard(folder):
    shard(folder, None)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(b"x" * 40)
    return path


def with_other_encoder(tensors):
    """Return a second encoder too, under names without the prefix of the first."""
    return tensors | {name.removeprefix("bert."): t + 1 for name, t in tensors.items() if name.startswith("bert.")}


def quantize(part, dtype):
    """Store the weights whose names contain `part` as whole numbers."""
    return stored(lambda tensors: {name: (t * 9).to(dtype) if part in name else t for name, t in tensors.items()})


def put(name, like):
    """Add a weight `name` of the shape of the first one whose name ends with `like`."""
    return stored(lambda tensors: tensors | {name: next(t.clone() for n, t in tensors.items() if n.endswith(like))})


def drop(folder, part):
    tensors = load_file(folder / SAFE)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / SAFE)


DISTANCES = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
BROKEN = {
    "shard missing": (lose_a_shard, "names 'model-00002-of-00003.safetensors', which is missing"),
    "shard damaged": (damage_a_shard, "model-00002-of-00003.safetensors: cannot be read"),
    "elsewhere": (point("model-00003-of-00003.safetensors"), "it lacks bert.*, which model.*index.json names there"),
    "above": (point("../model.safetensors"), "names the file '../model.safetensors'; expected a file in its own"),
    "inside and above": (point("x/../../model.safetensors"), "expected a file in its own folder"),
    "absolute": (point("/etc/passwd"), "names the file '/etc/passwd'; expected a file in its own folder"),
    "nothing": (point(""), "expected a file in its own folder"),
    "too long a name": (point("x" * 5000), "which is missing"),
    "NUL": (point("x\0"), "which is missing"),
    "no map": (change_index(lambda places: {"metadata": {}}), "it has no weight_map"),
    "empty map": (change_index(lambda places: {"weight_map": {}}), "it has no weight_map"),
    "map of numbers": (change_index(lambda places: {"weight_map": dict.fromkeys(places, 1)}), "it has no weight_map"),
    "a list": (change_index(lambda places: list(places)), "expected a JSON object"),
    "two values": (
        stored(lambda these: these | {f"module.{min(these)}": these[min(these)] + 1}),
        "occurs under two names, with different values",
    ),
    "two encoders": (stored(with_other_encoder), "have different values|occurs under two names, with different values"),
    "int8": (quantize("query.weight", torch.int8), "query.weight is quantized, torch.int8; save the model in a flo"),
    "packed": (quantize("layer.1.output.dense", torch.uint8), "output.dense.[a-z]* is quantized, torch.uint8"),
    "int32": (quantize("LayerNorm.bias", torch.int32), "LayerNorm.bias is quantized, torch.int32"),
    "scales": (put("bert.encoder.layer.0.output.dense.weight_scale", "dense.bias"), "has no place for the weight"),
    "another file": (set_keys(transformers_weights="other"), "transformers_weights is 'other'; rename that file to m"),
    "a layer too many": (put("bert.encoder.layer.2.output.dense.bias", "output.dense.bias"), "has no place for the w"),
    "a map too many": (put(DISTANCES, "dense.weight"), f"no place for the weight {DISTANCES}, nor for 0 more"),
    "fewer layers": (set_keys(num_hidden_layers=1), "no place .*layer.1.*, nor for 15 m"),
    "more layers": (set_keys(num_hidden_layers=3), "missing"),
    "narrower": (set_keys(intermediate_size=40), "config.json requires"),
    "shorter": (set_keys(max_position_embeddings=20), "config.json requires"),
}
"""Fault of a folder → a function that breaks one, and the words of the line."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_do_not_fit_are_refused_in_one_line(hf, vocab, kind, reader):
    write(hf, vocab, "bert")
    change, words = BROKEN[kind]
    change(hf)
    assert refused(words, READERS[reader], hf).exit_code == 1


def test_a_type_that_torch_only_stores_is_refused(tmp_path):
    header = json.dumps({"a.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    refused(r"cannot be read: torch stores torch\.float4\w+ but computes nothing with it", read_weights, tmp_path)


WITHOUT = (
    "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight", "embeddings.LayerNorm.weight",
    "embeddings.LayerNorm.bias", "layer.0.attention.self.key.weight", "layer.1.output.dense.bias", "layer.1.",
)  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("part", WITHOUT)
def test_missing_weights_of_the_encoder_are_refused(hf, vocab, part, reader):
    write(hf, vocab, "bert")
    drop(hf, part)
    assert refused("missing|no word embedding", READERS[reader], hf).exit_code == 1
    assert not isinstance(refused("of the encoder are missing", load_encoder, hf, masked_lm=True), NoMaskedLM)
    assert "all weights are new and random" in load_encoder(hf, random_init=True).origin


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "deberta", "modernbert", "distilbert", "mpnet"])
def test_a_missing_norm_is_refused_in_every_family(hf, vocab, family):
    write(hf, vocab, family)
    drop(hf, "embeddings.norm.weight" if family == "modernbert" else "embeddings.LayerNorm.weight")
    refused(r"1 \(embeddings.(LayerNorm|norm).weight\) of the encoder are missing", load_encoder, hf)


@pytest.mark.parametrize("family", UNTIED)
def test_an_output_matrix_of_its_own_is_no_word_embedding(hf, vocab, family):
    model = write(hf, vocab, family, UNTIED)
    tied_as(OUTPUTS, EMBEDDINGS)(hf, model)
    for masked_lm in (False, True):
        refused(r"1 \(.*embed.*\) of the encoder are missing", load_encoder, hf, masked_lm=masked_lm)


@pytest.mark.parametrize("family", POOLED)
def test_a_masked_lm_needs_no_pooler(hf, vocab, family):
    write(hf, vocab, family)
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
    write(hf, vocab, "modernbert")
    drop(hf, "decoder.bias")
    for reader in ("convert", "analyze"):
        refused("the weight for head.decoder.bias is missing", READERS[reader], hf)
    for class_name in ("ModernBertForTokenClassification", "ModernBertForSequenceClassification", "ModernBertModel"):
        write_folder(tmp_path / class_name, vocab, class_name, pad_token_id=0)
        READERS["convert"](tmp_path / class_name)


BESIDE = [
    ("bert", "bert.embeddings.position_ids", torch.arange(24)[None]),
    ("roberta", "roberta.embeddings.position_ids", torch.arange(24)[None]),
    ("roberta", "roberta.embeddings.token_type_ids", torch.zeros(1, 24).long()),
    ("deberta", "deberta.embeddings.position_embeddings.weight", torch.zeros(24, 32)),
    ("deberta-v2", "deberta.embeddings.position_embeddings.weight", torch.zeros(24, 32)),
    ("bert", "bert.pooler.dense.weight", torch.zeros(32, 32)),
    ("roberta", "roberta.pooler.dense.bias", torch.zeros(32)),
    ("bert", "cls.seq_relationship.weight", torch.zeros(2, 32)),
]


@pytest.mark.parametrize(("family", "name", "tensor"), BESIDE)
def test_what_released_folders_have_beside_the_encoder_is_left_out(hf, vocab, family, name, tensor):
    write(hf, vocab, family)
    stored(lambda tensors: tensors | {name: tensor})(hf)
    for read in READERS.values():
        read(hf)
