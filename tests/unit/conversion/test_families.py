"""Every family of the registry: equal to transformers in both directions, and what is special about each."""

import copy
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from parity import CASES, SIZES, Case, compare, draw, example, exported, imported
from safetensors.torch import load_file

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.config import ENCODINGS, STARTS, Config, ModelConfig, flag
from megatron_ddrp.conversion.families import FAMILIES, leaving_family
from megatron_ddrp.conversion.from_huggingface import import_folder, local_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import count_parameters
from tests.unit.conversion.conftest import ours, padded_pair_batch, write_checkpoint
from tests.unit.conversion.test_to_huggingface import run_tool

DISCRIMINATOR = Case(FAMILIES["electra"], "replaced-token")
GENERATOR = Case(FAMILIES["electra"], "masked-lm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Case → the folder in which its model of transformers was written and imported; one of each for all tests."""
    made = {}

    def folder(case):
        if case not in made:
            top = tmp_path_factory.mktemp("family")
            made[case] = top, imported(case, top)
        return made[case][0]

    folder.models = lambda case: (folder(case), copy.deepcopy(made[case][1]))[1]
    return folder


@pytest.mark.parametrize("direction", ["imported", "exported"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_and_logits_are_equal_in_both_directions(tmp_path, offline, folders, case, direction):
    theirs, model = folders.models(case) if direction == "imported" else exported(case, tmp_path)
    pad_id = theirs.config.pad_token_id
    assert max(compare(theirs, model, pad_id).all) < 1e-4
    assert max(compare(theirs.double(), model.double(), pad_id).all) < 1e-6
    model.layers[0].attention.value.weight.data *= 1.1
    assert min(compare(theirs, model, pad_id).all) > 1e-4, "the comparison does not see a change"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_leaves_as_the_family_it_came_from(tmp_path, case):
    config, tokenizer = example(case, tmp_path)
    assert leaving_family(config, case.head, tokenizer) is case.family
    assert leaving_family(config, case.head, tokenizer, case.family.model_type) is case.family


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_printed_command_is_the_model_and_its_objective(tmp_path, offline, folders, capsys, case):
    start = import_folder(folders(case) / "hf", tmp_path / "start")
    (line,) = (line for line in start.summary().splitlines() if line.startswith("then:"))
    words = shlex.split(line.removeprefix("then:"))
    assert words[:4] == ["megatron-ddrp", "pretrain", "--data-path", "corpus_text_document"]
    flags = words[4:]
    config = parse_arguments(flags).config
    expected = {"masked-lm": "mlm", "replaced-token": "electra", "contextual-replaced-token": "rtd"}
    is_bare = case.head in case.family.bare_heads  # transformers writes a folder without a head then
    objective = expected["masked-lm" if is_bare else case.head]
    assert start.objective.objective == objective and f"--objective {objective} " in line + " "
    for name, value in case.family.training.items():
        assert getattr(start.objective, name) == value and f"{flag(name)} {value}" in line
    assert config.optimizer.lr < Config().optimizer.lr and config.training.train_iters == 12500
    assert config.objective == start.objective == load_model(tmp_path / "start")[2].objective
    dry_run(config)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["parameters"] == count_parameters(start.model)[0]
    vocabulary = {"vocab_size": start.config.vocab_size}
    assert config.replace(model=vocabulary).model == start.config


def test_single_tokens_are_masked_where_they_were():
    by_token = {name for name, family in FAMILIES.items() if family.training.get("masking") == "token"}
    assert {"roberta", "xlm-roberta", "electra"} <= by_token and not {"bert", "camembert"} & by_token


def test_roberta_has_rows_that_no_token_reads(tmp_path, offline, folders):
    folder = folders(Case(FAMILIES["roberta"], "masked-lm"))
    table = load_file(folder / "hf" / "model.safetensors")["roberta.embeddings.position_embeddings.weight"]
    model, _, config = load_model(folder / "imported")
    assert len(table) == 26 and config.model.seq_length == 24 and config.model.num_segments == 1
    assert torch.equal(model.embeddings.absolute.weight, table[2:])
    export_checkpoint(folder / "imported", tmp_path / "hf")
    again = load_file(tmp_path / "hf" / "model.safetensors")["roberta.embeddings.position_embeddings.weight"]
    assert torch.equal(again[2:], table[2:]) and not again[:2].any()
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {"max_position_embeddings": 26, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0}
    assert expected.items() <= values.items()
    values = json.loads((folder / "hf" / "config.json").read_text()) | {"max_position_embeddings": 2}
    with pytest.raises(UserError, match="2 rows belong to padding: none is left"):
        FAMILIES["roberta"].settings(folder, FAMILIES["roberta"].complete(folder, values))


def write_electra(folder, case, embeddings_of=None, **settings):
    """A folder of one half of an ELECTRA, with the embeddings of the other half's model."""
    import transformers

    config, tokenizer = example(case, folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    values = case.family.folder_settings(config, case.head, tokenizer) | sizes | settings
    model_class = getattr(transformers, values["architectures"][0])
    model = model_class(model_class.config_class(**values)).eval()
    draw(model)
    if embeddings_of is not None:
        model.electra.embeddings.load_state_dict(embeddings_of.electra.embeddings.state_dict())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("width", [16, 8], ids=["projected", "as wide as its embeddings"])
@torch.no_grad()
def test_a_generator_joins_its_discriminator(tmp_path, offline, width):
    discriminator = write_electra(tmp_path / "d", DISCRIMINATOR, embedding_size=8)
    sizes = {"hidden_size": width, "num_attention_heads": width // 8, "intermediate_size": 4 * width}
    generator = write_electra(tmp_path / "g", GENERATOR, discriminator, embedding_size=8, **sizes)
    together = import_folder(tmp_path / "d", tmp_path / "start", generator=tmp_path / "g")
    assert together.weights.initialised == []
    assert together.objective.generator_config(together.model).num_attention_heads == width // 8
    model = load_model(tmp_path / "start")[0]
    ids, segments, mask = padded_pair_batch(18)
    place = torch.arange(ids.shape[1]).expand_as(ids) * mask
    theirs = generator(ids, mask, segments).logits
    lone = load_model(import_folder(tmp_path / "g", tmp_path / "lone").output)[0]
    torch.testing.assert_close(lone.logits(lone.encode(ids, segments, mask, place))[mask.bool()], theirs[mask.bool()])
    lone.embeddings, lone.layers = model.generator.embeddings, model.generator.layers
    joined = model.generator.head.logits(lone.encode(ids, segments, mask, place))[..., :18]
    torch.testing.assert_close(joined[mask.bool()], theirs[mask.bool()], atol=1e-5, rtol=1e-5)
    theirs = discriminator(ids, mask, segments).logits
    torch.testing.assert_close(
        model.head.logits(model.encode(ids, segments, mask, place))[mask.bool()], theirs[mask.bool()]
    )


def test_a_generator_that_does_not_belong_is_refused(tmp_path, offline, folders):
    discriminator = write_electra(tmp_path / "d", DISCRIMINATOR)
    other = write_electra(tmp_path / "other", GENERATOR, intermediate_size=64, hidden_size=16, num_attention_heads=2)
    other.electra.embeddings.word_embeddings.weight.data[5] += 0.1
    other.save_pretrained(tmp_path / "other")
    write_electra(tmp_path / "wide", GENERATOR, discriminator, intermediate_size=48)
    for name, words in (
        ("other", "embeddings.token.weight differs from the discriminator's"),
        ("wide", "its ffn_size is 48.*128"),
    ):
        with pytest.raises(UserError, match=f"{words}.*leave --generator out"):
            import_folder(tmp_path / "d", tmp_path / "start", generator=tmp_path / name)
    with pytest.raises(UserError, match="holds a masked LM: give the discriminator's folder"):
        import_folder(tmp_path / "wide", tmp_path / "start", generator=tmp_path / "wide")
    alone = import_folder(tmp_path / "d", tmp_path / "start")
    assert alone.weights.initialised == ["generator (drawn anew; the folder has none)"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_a_colleague_goes_on_from_an_export_alone(tmp_path, tokenizer, monkeypatch, encoding):
    monkeypatch.setattr("megatron_ddrp.conversion.to_huggingface.check_export", lambda *_: "in other tests")
    settings = {"position_encoding": encoding, "layernorm_position": "pre", "num_layers": 1}
    run = write_checkpoint(tmp_path / "run", tokenizer, **settings)
    export_checkpoint(run, tmp_path / "hf")
    start = import_folder(tmp_path / "hf", tmp_path / "start")
    assert start.objective.objective == "mth" and start.weights.left_out == start.weights.initialised == []
    (model, _, config), (again, theirs, restored) = load_model(run), load_model(tmp_path / "start")
    assert theirs.fingerprint == tokenizer.fingerprint
    assert restored.objective == config.objective and restored.model.position_encoding == encoding
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    for expected, found in zip(ours(model, ids, segments, mask), ours(again, ids, segments, mask), strict=True):
        assert torch.equal(expected[-1], found[-1])


def test_a_family_is_named_or_refused(tmp_path, offline, folders):
    folder = folders(Case(FAMILIES["roberta"], "masked-lm")) / "imported"
    assert export_checkpoint(folder, tmp_path / "bert", family_name="bert").family.class_name == "Bert"
    with pytest.raises(UserError, match="--family deberta: --position-encoding is absolute, and Deberta has deberta"):
        export_checkpoint(folder, tmp_path / "deberta", family_name="deberta")
    with pytest.raises(UserError, match="--family gpt is not known: expected one of camembert"):
        export_checkpoint(folder, tmp_path / "gpt", family_name="gpt")
    result = run_tool("--from-hf", folder, "--output", tmp_path / "x", "--family", "bert")
    assert result.returncode == 2 and "--family needs --load" in result.stderr


def test_the_start_of_a_run_decides_no_family(tmp_path):
    _, tokenizer = example(Case(FAMILIES["bert"], "masked-lm"), tmp_path)
    start = {"attention_init": "offsets", "direction_init": "free", "init_method_std": 0.5}
    config = ModelConfig(position_encoding="absolute", **SIZES | start)
    assert [name for name in STARTS if name not in start] == []
    assert leaving_family(config, "masked-lm", tokenizer).model_type == "bert"
    assert FAMILIES["bert"].refusal(config, "masked-lm") is None


@pytest.mark.parametrize("change", [{"ffn": "geglu"}, {"norm": "rmsnorm"}, {"bias": False}, {"embedding_size": 16}])
def test_other_backbones_are_no_bert(tmp_path, change):
    _, tokenizer = example(Case(FAMILIES["bert"], "masked-lm"), tmp_path)
    config = ModelConfig(position_encoding="absolute", **SIZES, **change)
    assert "Bert has" in FAMILIES["bert"].refusal(config, "masked-lm")
    expected = "electra" if "embedding_size" in change else "megatron_ddrp"
    assert leaving_family(config, "masked-lm", tokenizer).model_type == expected


@pytest.mark.parametrize("kind", ["distilbert", "albert", "gpt2"])
def test_other_models_are_told_what_is_supported(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError, match=f"model_type is '{kind}'.*supported are camembert, .*roberta, bert, electra"):
        import_folder(tmp_path, tmp_path / "start")


def test_a_hub_name_is_downloaded_or_told_how(tmp_path, offline, folders, monkeypatch):
    import huggingface_hub

    source, asked = folders(Case(FAMILIES["bert"], "masked-lm")) / "hf", []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        shutil.copytree(source, tmp_path / "snapshot", dirs_exist_ok=True)
        (tmp_path / "snapshot" / "model.safetensors").unlink(missing_ok=len(asked) == 1)
        return str(tmp_path / "snapshot")

    def fail(name, allow_patterns):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder(Path("google/bert")) == tmp_path / "snapshot"
    assert [("model.safetensors" in patterns) for _, patterns in asked] == [True, False]
    assert all(name == "google/bert" and not any("py" in p.split(".")[-1:] for p in ps) for name, ps in asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"\(no network\).*`hf download google/bert --local-dir DIR`"):
        import_folder(Path("google/bert"), tmp_path / "start")
    with pytest.raises(UserError, match="config.json: No such file"):
        import_folder(tmp_path / "missing", tmp_path / "start")
