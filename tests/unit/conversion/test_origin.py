"""An export has the modules, licence and head of its origin, and a card with facts of the run and nothing private."""

import getpass
import json
import re
import shlex
import socket

import pytest
import torch
from safetensors.torch import load_file

from megatron_ddrp import checkpoint
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands import convert as command
from megatron_ddrp.config import Config
from megatron_ddrp.conversion import to_huggingface
from megatron_ddrp.conversion.families.contract import CARD
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.model_card import Publishing, progress
from megatron_ddrp.conversion.origin import Origin, read_modules, stated_license
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.atomic import SUM, object_sum
from megatron_ddrp.engine.checkpoint import Progress
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import SAFE, set_keys, stored, write_checkpoint, write_folder

pytestmark = pytest.mark.usefixtures("few_probes")

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."
PATHS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
MODULES = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": path, "type": OLD + kind} for n, (kind, path) in enumerate(PATHS.items())
    ],
    "sentence_bert_config.json": {"max_seq_length": 17, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "find: "}},
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
}


def write_modules(folder):
    """Put the modules of a sentence encoder into a folder, and the card of one."""
    (folder / "1_Pooling").mkdir()
    for name, content in MODULES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / CARD).write_text("---\nlicense: apache-2.0\n---\n# Sentences\n")


@pytest.fixture
def encoder(hf, vocab):
    """A sentence encoder of the usual kind: a bare BERT, the mean of its states, length 1."""
    write_folder(hf, vocab, "BertModel")
    write_modules(hf)


def test_a_sentence_encoder_leaves_as_it_came(tmp_path, hf, encoder):
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
    card = (tmp_path / "out" / CARD).read_text()
    told = ("Base model: hf, under the licence apache-2.0.", "# license: unknown", "A sentence encoder, without a head")
    for words in (*told, "pipeline_tag: sentence-similarity", 'SentenceTransformer("USER/out")'):
        assert words in card
    assert "fill-mask" not in card


@pytest.mark.parametrize("kind", ["ModernBert", "Ddrp"])
def test_other_families_leave_without_a_head_too(tmp_path, hf, vocab, tokenizer, kind):
    """Norms of the former are the head's here, and all names of the latter are the training model's."""
    if kind == "Ddrp":
        run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="ddrp", deberta_emd=True)
        export_checkpoint(run, hf)
        (hf / "export_sums.json").unlink()
        stored(lambda tensors: {name: t for name, t in tensors.items() if name.startswith("encoder.")})(hf)
        set_keys(deberta_emd=False)(hf)
    else:
        write_folder(hf, vocab, "ModernBertModel")
        write_modules(hf)
    import_folder(hf, tmp_path / "start")
    export = export_checkpoint(tmp_path / "start", tmp_path / "out")
    assert export.family.classes(export.head) == (f"{kind}Model", "AutoModel")
    theirs, ours = load_file(hf / SAFE), load_file(tmp_path / "out" / SAFE)
    assert {name.removeprefix("encoder.") for name in theirs} == ours.keys()
    assert import_folder(tmp_path / "out", tmp_path / "again").origin.is_bare


def test_any_other_export_says_how_to_pool_keeps_its_head_and_says_how_long_its_rows_were(tmp_path, tokenizer, offline):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="absolute")
    export = export_checkpoint(run, tmp_path / "out")
    assert "sentences:   mean pooling, vectors of any length, rows of up to 24 pieces" in export.summary()
    import_folder(tmp_path / "out", tmp_path / "start")
    again = export_checkpoint(tmp_path / "start", tmp_path / "again")
    assert again.head == "masked-lm" and read_modules(tmp_path / "again") == read_modules(tmp_path / "out")
    change_config(run, training={"seq_length_phases": ("8:0.2", "16:0.5"), "train_iters": 10})  # step 3: rows of 16
    assert "rows of up to 16 pieces" in export_checkpoint(run, tmp_path / "phases").summary()
    card = (tmp_path / "phases" / CARD).read_text()
    assert "of up to 16 tokens |" in card and "The model has seen no text of more than 16 pieces." in card
    assert "| longest text | 24 pieces |" in card


KINDS = {
    "weights": ([f"{OLD}Transformer", f"{NEW}Pooling", f"{OLD}Dense", f"{OLD}Normalize"], [0, 1, 3], ["2"]),
    "code": ([f"{OLD}Transformer", "custom_st.Pooling"], [0], ["1"]),
    "code of the encoder": (["custom_st.Transformer", f"{OLD}Pooling"], None, ["Transformer", "1"]),
    "nothing": ([], None, []),
}


@pytest.mark.parametrize(("kinds", "kept", "left_out"), KINDS.values(), ids=KINDS)
def test_modules_with_weights_or_code_are_left_out_by_name(tmp_path, kinds, kept, left_out):
    modules = [{"path": str(number) * (number > 0), "type": kind} for number, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    files, without = read_modules(tmp_path)
    assert files.get("modules.json") == (None if kept is None else [modules[number] for number in kept])
    assert without == left_out


DAMAGED = {
    "{}": "modules.json: expected a list",
    '[{"path": ""}]': "modules.json: type is missing",
    f'[{{"path": "../x", "type": "{OLD}Transformer"}}]': r"a path is '\.\./x', expected the name of a folder",
    f'[{{"path": ".", "type": "{OLD}Transformer"}}]': r"a path is '\.', expected",
    "[": "modules.json: not JSON",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_modules_are_refused_before_anything_is_written(tmp_path, hf, encoder, content):
    (hf / "modules.json").write_text(content)
    refused(DAMAGED[content], import_folder, hf, tmp_path / "start")
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize("card", ["", "# no metadata", "---\n[\n---", "---\n- mit\n---"])
def test_a_licence_that_no_card_states_is_none(tmp_path, card):
    (tmp_path / CARD).write_text(card)
    assert stated_license(tmp_path) is None


@pytest.mark.parametrize(
    ("head", "step", "losses", "offered"),
    [(True, 0, {}, True), (False, 0, {}, False), (False, 3, {}, False)]
    + [(False, 3, {"lm_loss": loss}, offered) for loss, offered in ((6.9, True), (7.0, False))]
    + [(False, 3, {"lm_loss": 6.0, "valid_lm_loss": 7.5}, False)],
)
def test_fill_mask_is_offered_only_if_the_head_was_trained(tmp_path, hf, vocab, unchecked, head, step, losses, offered):
    write_folder(hf, vocab, "BertForMaskedLM" if head else "BertModel")
    run = import_folder(hf, tmp_path / "run").output
    path = checkpoint.newest(run)
    if step:
        checkpoint.write_state(path, checkpoint.read_state(path) | {"iteration": step, "weights_only": False})
        path = path.rename(run / checkpoint.tag(step))
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": step, **losses}) + "\n")
        (run / "unigram.json").write_text('{"unigram_loss": 7.0}')
    export_checkpoint(path, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert ("pipeline_tag: fill-mask" in card) == ("mask_token" in card) == offered
    assert ("a masked-LM head that has learned too little to be used" in card) != offered


@pytest.fixture
def unchecked(monkeypatch):
    """Exports without their check by transformers, which other tests make."""
    monkeypatch.setattr(to_huggingface, "check_export", lambda *_: "not checked")


@pytest.fixture
def run(tmp_path, tokenizer, unchecked):
    """A run of 3 of 10 steps on two datasets, one of them gone, in folders with telling names."""
    home = tmp_path / "home" / "jane.doe" / "secret-project"
    folder = write_checkpoint(home / "runs" / "first", tokenizer)
    metrics = [
        {"iteration": 1, "loss": 9.0, "lm_loss": 8.0, "lr": 1e-4},
        {"iteration": 2, "valid_lm_loss": 7.5},
        {"iteration": 3, "loss": 6.25, "lm_loss": 5.5, "tcd_loss": 0.75, "lm_accuracy": 0.125, "lr": 1e-4},
        {"iteration": 3, "valid_lm_loss": 5.25, "valid_lm_accuracy": 0.5, "other_lm_loss": 6.75},
        {"iteration": 4, "loss": 1.0, "lm_loss": 1.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    inputs = [{"name": f"{home}/part-{number}.jsonl", "bytes": 1} for number in range(7)]
    manifest = {"documents": 1234, "tokens": 56789, "inputs": inputs, "tokenizer": {}}
    manifest[SUM] = object_sum(manifest)
    (home / "wiki_text_document.json").write_text(json.dumps(manifest))
    words = ("3", str(home / "wiki_text_document"), "1", str(home / "gone_text_document"))
    change_config(
        folder,
        data={"data_path": words, "vocab_file": str(home / "vocab.txt"), "index_cache_dir": str(home / "cache")},
        training={"train_iters": 10},
        optimizer={"lr": 3e-4},
        checkpoint={"save": str(folder), "load": str(home / "start")},
        logging={"wandb_project": "secret-project", "tensorboard_dir": str(home / "boards")},
    )
    layout = {"ranks": 4, "tensor": 1, "pipeline": 1, "zero_stage": 1, "precision": "fp32"}
    path, more = folder / checkpoint.tag(3), {"consumed_samples": 96, "consumed_tokens": 2100, "layout": layout}
    checkpoint.write_state(path, checkpoint.read_state(path) | more)
    return folder


def card_of(run, output, **publishing):
    export_checkpoint(run, output, publishing=Publishing(**publishing))
    return (output / CARD).read_text(encoding="utf-8")


def change_config(run, **changes):
    """Store other settings in the run's checkpoint."""
    path = run / checkpoint.tag(3)
    state = checkpoint.read_state(path)
    state["config"] = Config.from_dict(state["config"]).replace(**changes).to_dict()
    checkpoint.write_state(path, state)


def replayed(card):
    """Return the configuration of the card's command."""
    command = shlex.split(re.search(r"```bash\n(.*?)```", card, re.DOTALL)[1].replace("\\\n", ""))
    assert command[:4] == ["deepspeed", "--module", "megatron_ddrp", "pretrain"]
    return parse_arguments(command[4:]).config


def test_the_card_names_the_checkpoint_that_a_resumed_run_once_started_from():
    state = {"iteration": 3, "started_from": "bert/iter_0000000"}
    resumed = Config().replace(checkpoint={"load": "run", "save": "run"})
    told = "started from the checkpoint `bert/iter_0000000`, which the command needs as `--load`."
    assert told in progress(resumed, state)
    assert "started from" not in progress(resumed, {**state, "started_from": None})


def test_the_card_tells_data_losses_settings_and_command_and_nothing_private(run, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "some-host")
    monkeypatch.setenv("LOGNAME", "some-user")
    card = card_of(run, tmp_path / "hf")
    files = "part-0.jsonl, part-1.jsonl, part-2.jsonl, part-3.jsonl, part-4.jsonl and 2 more"
    told = [
        f"| wiki_text_document | 1,234 | 56,789 | 75.0% | {files} |",
        "No manifest was found for gone_text_document when this card was written.",
        "The run made 3 of 10 steps, on 96 sequences with 2,100 tokens. Training started from the checkpoint `start`, "
        "which the command needs as `--load`.",
        "| metric | training, step 3 | validation, step 3 | other text, step 3 |",
        *("| lm_loss | 5.5000 | 5.2500 | 6.7500 |", "| lm_accuracy | 0.1250 | 0.5000 |  |", "| ranks | 4 |"),
        "| tcd_loss | 0.7500 |  |  |",
    ]
    assert [line for line in told if line not in card.splitlines()] == []
    assert "\n| learning rate | 0.0003, " in card
    private = [str(tmp_path), "/home", "jane", "secret", "cache", "boards", socket.gethostname()]
    assert not [word for word in private if word in card]
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", card)
    assert not re.search(r"(?<![\w.:`])/\w", card), "an absolute path"
    again = replayed(card)
    assert again.data.data_path == ("3", "wiki_text_document", "1", "gone_text_document")
    assert (again.training.train_iters, again.optimizer.lr, again.model.hidden_size) == (10, 3e-4, 32)
    assert again.model.relative_distance == 4 and again.objective.objective == "mth"
    change_config(run, optimizer={"lr_warmup_iters": 3, "lr_warmup_fraction": 0.05})
    assert replayed(card_of(run, tmp_path / "again")).optimizer.lr_warmup_iters == 3, "one warm-up"


def test_the_command_has_the_theta_of_the_run_and_the_model_that_of_its_phase(tmp_path, tokenizer, unchecked):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="rope")
    training = {"seq_length_phases": ("8:0.2:500", "16:0.6:1000"), "train_iters": 10}
    change_config(run, training=training)
    card = card_of(run, tmp_path / "hf")
    again = replayed(card)
    assert again.training.seq_length_phases == training["seq_length_phases"]
    assert again.model.rope_theta == Config().model.rope_theta and "--rope-theta" not in card
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["rope_theta"] == 1000.0


def test_the_hub_reads_the_metadata_and_a_license_is_never_made_up(run, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    card_of(run, tmp_path / "hf", license="apache-2.0", languages=("en", "ja"))
    data = hub.ModelCard.load(tmp_path / "hf" / CARD).data.to_dict()
    expected = {"license": "apache-2.0", "language": ["en", "ja"], "library_name": "transformers"}
    expected |= {"pipeline_tag": "fill-mask", "mask_token": "[MASK]"}
    assert data | expected | {"widget": [{"text": "Paris is the [MASK] of France."}]} == data
    assert {"megatron-ddrp", "ddrp", "mth"} <= set(data["tags"])
    unknown = card_of(run, tmp_path / "unknown")
    assert hub.ModelCard(unknown).data.license is None and "**License: unknown.**" in unknown
    assert "# license: unknown; set it before publishing" in unknown
    assert "unknown" not in card_of(run, tmp_path / "licensed", license="mit").split("## Versions")[0]
    japanese = card_of(run, tmp_path / "ja", languages=("ja",))
    assert "widget" not in hub.ModelCard(japanese).data.to_dict() and "Paris" not in japanese


def test_the_example_of_the_card_runs(run, tmp_path, offline, capsys):
    card = card_of(run, tmp_path / "hf")
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("USER/hf", str(tmp_path / "hf"))
    exec(example, {})
    assert "'score'" in capsys.readouterr().out


def test_a_discriminator_and_a_plain_family_say_what_they_are(tmp_path, tokenizer, unchecked):
    run = write_checkpoint(tmp_path / "run", tokenizer, "electra", position_encoding="ddrp")
    card = card_of(run, tmp_path / "hf")
    assert "pipeline_tag: feature-extraction" in card and "fill-mask" not in card and "mask_token" not in card
    assert "AutoModel.from_pretrained" in card and "The weights carry no record of their training data." in card
    bert = write_checkpoint(tmp_path / "bert", tokenizer, position_encoding="absolute")
    assert "trust_remote_code" not in card_of(bert, tmp_path / "plain")


def test_the_command_prints_how_to_upload_and_a_flag_belongs_to_its_input_alone(run, tmp_path, convert):
    words = ("--load", run, "--output", tmp_path / "the model", "--license", "mit", "--language", "en")
    upload = convert(*words).stdout.splitlines()[-1]
    assert upload.endswith(f"/README.md, then hf upload USER/NAME '{tmp_path}/the model'")
    assert "license: mit" in (tmp_path / "the model" / CARD).read_text()
    for given, flag, needed in (
        ("--from-hf", ("--license", "mit"), "--load"),
        ("--from-hf", ("--family", "bert"), "--load"),
        ("--load", ("--vocab-file", "a"), "--from-hf"),
        ("--load", ("--int8",), "--onnx"),
    ):
        words = [given, "a", "--output", "b", *flag]
        wrong_arguments(f"^{flag[0]} needs {needed}: leave it out$", command.main, words)
