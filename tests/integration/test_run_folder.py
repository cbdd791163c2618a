"""The files that a run leaves: its folder, metrics, similarities, profiles, validation, TensorBoard."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import load_model, read_state
from megatron_ddrp.config import load_config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import load_tokenizer
from megatron_ddrp.model.embeddings import document_mask
from megatron_ddrp.model.stages import Draws
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags, Told, Train
from tests.integration.launch import read_rows, start_ranks, steps_of, training_rows
from tests.unit.model.tiny import named_sums

COMPILER = "torch._inductor.compile_fx"
KEYS = [
    *("iteration", "consumed_samples", "consumed_tokens", "loss", "lm_loss", "tcd_loss", "hcd_loss"),
    *("lm_accuracy", "lr", "grad_norm", "tokens_per_second", "step_time", "mfu", "peak_memory_gib"),
]


def assert_complete(folder: Path, corpus: TinyCorpus) -> None:
    """All that others read from a `--save` folder is there, for a run of 5 steps logged every second step."""
    rows = read_rows(folder)
    assert [row["iteration"] for row in rows if "loss" in row] == [1, 2, 4, 5]
    for row in rows:
        assert list(row) == (KEYS if "loss" in row else ["iteration", "valid_lm_loss", "valid_lm_accuracy"])
    assert [row["iteration"] for row in rows if "valid_lm_loss" in row] == [3, 5] and rows[-1]["iteration"] == 5
    first = rows[0]
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["tcd_loss"] + 0.01 * first["hcd_loss"])
    assert read_state(folder / "iter_0000005")["consumed_samples"] == 5 * 8
    config = load_config(folder)
    assert config.training.train_iters == 5
    tokenizer = load_tokenizer(folder / "tokenizer")
    pieces = corpus.vocab_file.read_text(encoding="utf-8").split("\n")[:-1]
    assert tokenizer.vocab_size == config.model.vocab_size == len(pieces)
    assert (folder / "latest").read_text(encoding="utf-8").strip() == "iter_0000005"
    assert not list(folder.rglob("*.tmp"))


COMPLETE = {"log_interval": 2, "eval_interval": 3, "eval_iters": 1, "peak_tflops": 0.01}


def without_compiler() -> None:
    """Let this rank fail if it loads torch's compiler, which takes a sixth of the start of a run."""
    assert sys.modules.setdefault(COMPILER, None) is None  # type: ignore[arg-type]


def test_a_run_leaves_all_files_and_loads_no_compiler(tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    result = start_ranks(flags(save=tmp_path, **COMPLETE), before=without_compiler).check()
    assert_complete(tmp_path, tiny_corpus)
    lines = [line for line in result.stdout[0].splitlines() if line.startswith("step ")]
    assert len(lines) == 6
    for part in ("step 5/5 | loss ", "mlm ", "tcd ", "hcd ", "| lr ", "| gnorm ", " tok/s | mfu ", "| mem ", "| eta "):
        assert part in lines[4]
    assert result.stderr == [""]


STILL = {"lr": 0.0, "hidden_dropout": 0.1, "attention_dropout": 0.1, "eval_interval": 2, "eval_iters": 3}
"""A run whose weights stay as they were drawn, validated at steps 2 and 4."""


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mth", "electra"])
def test_validation_depends_on_the_weights_alone(train: Train, flags: Flags, tmp_path: Path, objective: str) -> None:
    """Same samples, masks and draws, no dropout: at another step, after a resume, under another seed, on two ranks, in
    other micro-batches."""
    still = STILL | {"objective": objective, "train_iters": 4}
    rows = train(save=tmp_path / "one", exit_interval=2, **still).rows
    rows += train(save=tmp_path / "one", load=tmp_path / "one", exit_interval=2, seed=7, **still).rows
    start_ranks(flags(save=tmp_path / "two", micro_batch_size=2, **still), world_size=2).check()
    before, after = (row | {"iteration": 0} for row in rows if "valid_lm_loss" in row)
    assert before == after
    of_two_ranks = [row["valid_lm_loss"] for row in read_rows(tmp_path / "two") if "valid_lm_loss" in row]
    assert of_two_ranks == pytest.approx([before["valid_lm_loss"]] * 2, rel=1e-6)
    first, second, *_ = steps_of(rows)
    assert first["lm_loss"] != second["lm_loss"]


def test_tensorboard_has_the_rows(train: Train, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = train(tensorboard_dir=tmp_path / "board", eval_interval=5, eval_iters=1).rows
    board = events.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    logged = {event.step: event.value for event in board.Scalars("lm_loss")}
    assert logged == pytest.approx({row["iteration"]: row["lm_loss"] for row in steps_of(rows)}, rel=1e-6)
    assert [event.step for event in board.Scalars("valid_lm_loss")] == [5]


def test_a_dry_run_writes_nothing_and_counts_as_the_run_does(told: Told, tmp_path: Path) -> None:
    said = told(save=tmp_path / "run", tensorboard_dir=tmp_path / "board", dry_run=True)
    summary = json.loads(said.splitlines()[-1])
    assert not list(tmp_path.iterdir()) and summary["position_parameters"] == (3 + 8) * 8
    assert f"{summary['parameters']:,} parameters ({(3 + 8) * 8} of positions)" in told(train_iters=1)


ONE_VALIDATION = {"train_iters": 2, "eval_interval": 2, "eval_iters": 1, "objective": "mlm"}


def test_similarity_is_logged_and_changes_no_step(told: Told, train: Train, tmp_path: Path) -> None:
    lines = told(save=tmp_path / "with", log_similarity=True, **ONE_VALIDATION)
    rows, plain = read_rows(tmp_path / "with"), train(**ONE_VALIDATION).rows
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in plain if "loss" in row]
    row, bare = rows[-1], plain[-1]
    assert list(bare) == ["iteration", "valid_lm_loss", "valid_lm_accuracy"]
    assert list(row) == [*bare][:2] + ["token_similarity", "head_similarity", "valid_lm_accuracy"]
    assert row["valid_lm_loss"] == pytest.approx(bare["valid_lm_loss"], rel=1e-6)
    assert f"f(S) {row['token_similarity']:.4f} f(H) {row['head_similarity']:.4f}" in lines
    model, _, config = load_model(tmp_path / "with")
    heads = torch.arange(4).expand(config.model.num_layers, -1)
    totals: Any = Counter()
    for arrays in Corpus.open(config).loader("valid", 0, 1).step(0):
        batch = arrays.map(torch.from_numpy)
        sums = named_sums(model, batch, Draws(document_mask(batch.document_ids, 1).long(), heads))
        totals.update({name: sums[name].item() for name in ("tcd_loss", "hcd_loss", "lm_loss")})
        totals.update(predicted=int((batch.labels != IGNORED_LABEL).sum()), rows=len(batch.input_ids))
    assert row["valid_lm_loss"] == pytest.approx(totals["lm_loss"] / totals["predicted"], rel=1e-5)
    assert row["token_similarity"] == pytest.approx(totals["tcd_loss"] / totals["rows"], rel=1e-5)
    assert row["head_similarity"] == pytest.approx(totals["hcd_loss"] / totals["rows"], rel=1e-4, abs=1e-6)


def test_squared_cosines_are_trained_on_but_not_logged(train: Train) -> None:
    still = ONE_VALIDATION | {"lr": 0.0, "tcd_weight": 1.0, "tcd_tokens": 0, "log_similarity": True}
    cosines, squares = (train(**still, tcd_squared=kind).rows for kind in (False, True))
    first = squares[0]
    assert 0 <= first["tcd_loss"] < cosines[0]["tcd_loss"] - 0.01
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["tcd_loss"])
    assert squares[-1]["token_similarity"] == cosines[-1]["token_similarity"]


PROFILED = {"objective": "mlm", "train_iters": 6, "eval_interval": 0, "log_interval": 1}
WINDOW = {"profile": True, "profile_step_start": 2, "profile_step_end": 4}


def losses_in(trace: Path) -> int:
    """Return the number of cross-entropies in a trace: masked LM has one per step."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event["name"] == "aten::_log_softmax" for event in events if event.get("ph") == "X")


def test_the_first_replica_profiles_the_steps_asked_for(flags: Flags, tmp_path: Path) -> None:
    done = start_ranks(flags(save=tmp_path, **PROFILED, **WINDOW), world_size=2).check()
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps-3-4-rank-0.json.gz", "steps-3-4-rank-0.txt"]
    table = (folder / "steps-3-4-rank-0.txt").read_text(encoding="utf-8").splitlines()
    assert sum("aten::" in line for line in table) > 100, "operations are left out"
    assert losses_in(folder / "steps-3-4-rank-0.json.gz") == 2
    (line,) = [line for line in done.stdout[0].splitlines() if line.startswith("profile of ")]
    assert line.startswith("profile of steps 3 to 4 on rank 0, ") and f"; {folder}/steps-3-4-rank-0.txt has all" in line
    before, after = (f"step {step}/6 |" for step in (4, 5))
    assert done.stdout[0].index(before) < done.stdout[0].index(line) < done.stdout[0].index(after)


def test_every_stage_of_a_pipeline_is_profiled_and_no_number_changes(flags: Flags, tmp_path: Path) -> None:
    pipeline = {"pipeline_model_parallel_size": 2, **PROFILED}
    lines = start_ranks(flags(save=tmp_path / "with", **pipeline, **WINDOW), world_size=2).check().stdout[0]
    start_ranks(flags(save=tmp_path / "without", **pipeline), world_size=2).check()
    assert training_rows(tmp_path / "with") == training_rows(tmp_path / "without")
    names = {path.name for path in (tmp_path / "with" / "profile").iterdir()}
    assert names == {f"steps-3-4-rank-{rank}.{kind}" for rank in (0, 1) for kind in ("txt", "json.gz")}
    assert [lines.count(f"profile of steps 3 to 4 on rank {rank}") for rank in (0, 1)] == [1, 1]


def test_without_numbers_it_profiles_two_steps_after_ten_of_the_run_that_resumes(told: Told, tmp_path: Path) -> None:
    run = PROFILED | {"save": tmp_path, "load": tmp_path, "train_iters": 15, "profile": True}
    line = "no profile: the run stopped after step 3, before step 12 (--profile-step-end)"
    assert line in told(**run, exit_interval=3)
    told(**run)
    assert [path.name for path in sorted((tmp_path / "profile").iterdir())][1] == "steps-14-15-rank-0.txt"


def test_a_profile_that_cannot_be_written_or_made_is_told_and_the_run_goes_on(told: Told, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    done = told(save=tmp_path, **PROFILED, **WINDOW)
    assert done.startswith("without effect: --tcd-tokens 6 (without TCD "), "what there is to say of the flags is said"
    assert "profile of rank 0 not written: [Errno 17] File exists: " in done and "saved" in done
    line = "no profile: steps 11 to 12 are not among those of this run, 1 to 6; set --profile-step-start"
    assert line in told(save=tmp_path / "short", profile=True, **PROFILED)
