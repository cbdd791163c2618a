"""The model card of an export: metadata that the hub reads, facts of the run, and nothing private."""

import getpass
import json
import re
import shlex
import socket

import pytest

from megatron_ddrp import checkpoint
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.conversion import to_huggingface
from megatron_ddrp.conversion.families.contract import CARD
from megatron_ddrp.conversion.model_card import Publishing, progress
from megatron_ddrp.data.atomic import SUM, object_sum
from tests.unit.conversion.conftest import write_checkpoint

METRICS = [
    {"iteration": 1, "loss": 9.0, "lm_loss": 8.0, "lr": 1e-4},
    {"iteration": 2, "valid_lm_loss": 7.5},
    {"iteration": 3, "loss": 6.25, "lm_loss": 5.5, "tcd_loss": 0.75, "lm_accuracy": 0.125, "lr": 1e-4},
    {"iteration": 3, "valid_lm_loss": 5.25, "valid_lm_accuracy": 0.5, "other_lm_loss": 6.75},
    {"iteration": 4, "loss": 1.0, "lm_loss": 1.0},
]


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run of 3 of 10 steps on two datasets, one of them gone, in folders with telling names."""
    home = tmp_path / "home" / "jane.doe" / "secret-project"
    folder = write_checkpoint(home / "runs" / "first", tokenizer)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    inputs = [{"name": f"{home}/part-{number}.jsonl", "bytes": 1} for number in range(7)]
    manifest = {"documents": 1234, "tokens": 56789, "inputs": inputs, "tokenizer": {}}
    manifest[SUM] = object_sum(manifest)
    (home / "wiki_text_document.json").write_text(json.dumps(manifest))
    words = ("3", str(home / "wiki_text_document"), "1", str(home / "gone_text_document"))
    path = folder / checkpoint.tag(3)
    state = checkpoint.read_state(path)
    config = Config.from_dict(state["config"]).replace(
        data={"data_path": words, "vocab_file": str(home / "vocab.txt"), "index_cache_dir": str(home / "cache")},
        training={"train_iters": 10},
        optimizer={"lr": 3e-4},
        checkpoint={"save": str(folder), "load": str(home / "start")},
        logging={"wandb_project": "secret-project", "tensorboard_dir": str(home / "boards")},
    )
    layout = {"ranks": 4, "tensor": 1, "pipeline": 1, "zero_stage": 1, "precision": "fp32"}
    more = {"consumed_samples": 96, "consumed_tokens": 2100, "layout": layout, "config": config.to_dict()}
    checkpoint.write_state(path, state | more)
    return folder


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Exports without their check by transformers, whose tests are elsewhere."""
    monkeypatch.setattr(to_huggingface, "check_export", lambda *_: "not checked")


def card_of(run, output, **publishing):
    to_huggingface.export_checkpoint(run, output, publishing=Publishing(**publishing))
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
    assert "started from the checkpoint `bert/iter_0000000`, which the command needs as `--load`." in progress(
        resumed, state
    )
    assert "started from" not in progress(resumed, {**state, "started_from": None})


def test_the_card_tells_data_losses_settings_and_command(run, tmp_path):
    card = card_of(run, tmp_path / "hf")
    lines = card.splitlines()
    files = "part-0.jsonl, part-1.jsonl, part-2.jsonl, part-3.jsonl, part-4.jsonl and 2 more"
    assert rf"| wiki_text_document | 1,234 | 56,789 | 75.0% | {files} |" in lines
    assert "No manifest was found for gone_text_document when this card was written." in lines
    steps = (
        "The run made 3 of 10 steps, on 96 sequences with 2,100 tokens. Training started from the checkpoint `start`, "
        "which the command needs as `--load`."
    )
    assert steps in lines
    assert "| metric | training, step 3 | validation, step 3 | other text, step 3 |" in lines
    assert "| lm_loss | 5.5000 | 5.2500 | 6.7500 |" in lines and "| lm_accuracy | 0.1250 | 0.5000 |  |" in lines
    assert "| tcd_loss | 0.7500 |  |  |" in lines
    assert "| ranks | 4 |" in lines and any(line.startswith("| learning rate | 0.0003, ") for line in lines)
    again = replayed(card)
    assert again.data.data_path == ("3", "wiki_text_document", "1", "gone_text_document")
    assert (again.training.train_iters, again.optimizer.lr, again.model.hidden_size) == (10, 3e-4, 32)
    assert again.model.relative_distance == 4 and again.objective.objective == "mth"


def test_the_command_has_the_theta_of_the_run_and_the_model_that_of_its_phase(tmp_path, tokenizer):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="rope")
    training = {"seq_length_phases": ("8:0.2:500", "16:0.6:1000"), "train_iters": 10}
    change_config(run, training=training)
    card = card_of(run, tmp_path / "hf")
    again = replayed(card)
    assert again.training.seq_length_phases == training["seq_length_phases"]
    assert again.model.rope_theta == Config().model.rope_theta and "--rope-theta" not in card
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["rope_theta"] == 1000.0


def test_the_command_has_one_warm_up(run, tmp_path):
    change_config(run, optimizer={"lr_warmup_iters": 3, "lr_warmup_fraction": 0.05})
    assert replayed(card_of(run, tmp_path / "hf")).optimizer.lr_warmup_iters == 3


def test_the_card_holds_nothing_private(run, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "some-host")
    monkeypatch.setenv("LOGNAME", "some-user")
    card = card_of(run, tmp_path / "hf")
    private = [str(tmp_path), "/home", "jane", "secret", "cache", "boards", socket.gethostname()]
    assert not [word for word in private if word in card]
    user = getpass.getuser()
    assert not re.search(rf"\b{re.escape(user)}\b", card)
    assert not re.search(r"(?<![\w.:`])/\w", card), "an absolute path"


def test_the_hub_reads_the_metadata_and_a_license_is_never_made_up(run, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    card_of(run, tmp_path / "hf", license="apache-2.0", languages=("en", "ja"))
    data = hub.ModelCard.load(tmp_path / "hf" / CARD).data
    assert (data.license, data.language) == ("apache-2.0", ["en", "ja"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "fill-mask")
    assert {"megatron-ddrp", "ddrp", "mth"} <= set(data.tags)
    assert data.to_dict()["mask_token"] == "[MASK]"
    assert data.to_dict()["widget"] == [{"text": "Paris is the [MASK] of France."}]
    unknown = card_of(run, tmp_path / "unknown")
    assert hub.ModelCard(unknown).data.license is None
    assert "# license: unknown; set it before publishing" in unknown and "**License: unknown.**" in unknown
    assert "unknown" not in card_of(run, tmp_path / "licensed", license="mit").split("## Versions")[0]
    japanese = card_of(run, tmp_path / "ja", languages=("ja",))
    assert "widget" not in hub.ModelCard(japanese).data.to_dict() and "Paris" not in japanese


def test_the_example_of_the_card_runs(run, tmp_path, offline, capsys):
    card = card_of(run, tmp_path / "hf")
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("USER/hf", str(tmp_path / "hf"))
    exec(example, {})
    assert "'score'" in capsys.readouterr().out


def test_a_discriminator_and_a_plain_family_say_what_they_are(tmp_path, tokenizer):
    run = write_checkpoint(tmp_path / "run", tokenizer, "electra", position_encoding="ddrp")
    card = card_of(run, tmp_path / "hf")
    assert "pipeline_tag: feature-extraction" in card and "fill-mask" not in card and "mask_token" not in card
    assert "AutoModel.from_pretrained" in card and "The weights carry no record of their training data." in card
    bert = write_checkpoint(tmp_path / "bert", tokenizer, position_encoding="absolute")
    assert "trust_remote_code" not in card_of(bert, tmp_path / "plain")


def test_the_command_prints_how_to_upload_and_a_card_belongs_to_exports_alone(run, tmp_path, convert):
    words = ("--load", run, "--output", tmp_path / "the model", "--license", "mit", "--language", "en")
    upload = convert(*words).stdout.splitlines()[-1]
    assert upload.endswith(f"/README.md, then hf upload USER/NAME '{tmp_path}/the model'")
    assert "license: mit" in (tmp_path / "the model" / CARD).read_text()
    done = convert("--from-hf", "a", "--output", "b", "--license", "mit")
    assert done.returncode and "--license needs --load: leave it out" in done.stderr
    assert len(done.stderr.splitlines()) == 1
