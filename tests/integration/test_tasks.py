"""Fine-tuning, a comparison and sentence embeddings as a user starts them: on ranks, with workers, killed, resumed."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

import megatron_ddrp
from megatron_ddrp import checkpoint
from megatron_ddrp.conversion.from_huggingface import import_folder
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS
from tests.integration.launch import ROOT, Hold, Result, armed, fork_jobs, json_file, json_lines, read_rows, start_ranks
from tests.refusals import refused
from tests.unit.conversion.conftest import WORDS, write_checkpoint
from tests.unit.tasks.conftest import sentences, write_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up CoLA and STS-B of odd sizes and lengths, and a BERT with dropout that learns them."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("glue")
    for name, count, seed in (("train", 61, 0), ("dev", 37, 1)):
        cola, sts = [], ["index\tsentence1\tsentence2\tscore"]
        for index, (text, is_colour) in enumerate(sentences(count, seed)):
            words = text.split()[: 1 + index % 3]
            cola.append(f"made\t{is_colour}\t\t{' '.join(words)}")
            sts.append(f"{index}\t{' '.join(words)}\tred cat\t{len(words) * is_colour}.000")
        for task, lines in (("CoLA", cola), ("STS-B", sts)):
            (folder / "data" / task).mkdir(parents=True, exist_ok=True)
            (folder / "data" / task / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    import_folder(write_bert(folder / "bert"), folder / "ours")  # whose workers need not import transformers
    return folder


def command(folder: Path, out: Path, *more: str) -> list[str]:
    """What follows `python -m tasks.glue`; later words win."""
    words = ["--tasks", "CoLA", "STS-B", "--data-dir", folder / "data", "--load", folder / "ours", "--output-dir", out]
    words += ["--grid", "quick", "--seeds", "1", "--lr", "1e-2", "--batch-size", "8", "--epochs", "8", *more]
    return [str(word) for word in words]


def rows(out: Path) -> list[dict]:
    """Lines of runs.jsonl by name, without what depends on the clock."""
    found = [{k: v for k, v in row.items() if k not in ("seconds", "crc32")} for row in json_lines(out / "runs.jsonl")]
    return sorted(found, key=lambda row: row["predictions"])


def predictions(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((out / "predictions").glob("*.tsv"))}


def run(words: list[str], ranks: int | None = None) -> str:
    """Standard output of `python -m tasks.glue WORDS`, or of rank 0 under a launcher; it must end well."""
    return start_ranks(words, ranks, program="tasks.glue").check().stdout[0]


@pytest.fixture(scope="module")
def alone(folder):
    """The sweep by one process; the encoder must learn."""
    run(command(folder, folder / "alone"))
    found = rows(folder / "alone")
    assert [row["dev_examples"] for row in found] == [37, 37]
    assert all(row["score"] is not None and row["score"] > 0.3 for row in found)
    return folder / "alone"


@pytest.mark.slow
def test_one_and_two_ranks_have_the_same_scores(folder, alone):
    """To the last digit of the regression's predictions, with dropout and an odd number of rows."""
    said = run(command(folder, folder / "ranks"), ranks=2)
    assert said.count("plan:") == 1
    assert rows(folder / "ranks") == rows(alone)
    assert predictions(folder / "ranks") == predictions(alone)


@pytest.mark.slow
def test_a_killed_worker_does_no_harm_where_the_other_does_its_runs(folder, alone):
    """It is killed with a lease, while the other holds one too."""
    out, hold = folder / "one killed", Hold(folder / "pipe")

    def kill_a_worker(commands: list[Any]) -> None:
        workers = [hold.next_process(commands[0].sentinel) for _ in range(2)]
        os.kill(workers[0], signal.SIGKILL)
        hold.release()

    points = armed(f"job.leased={hold.action}", then=fork_jobs)
    words = command(folder, out, "--workers", "2")
    start_ranks(words, None, points, kill_a_worker, program="tasks.glue").check()
    assert rows(out) == rows(alone)
    assert (out / "table.md").is_file()


@pytest.mark.slow
def test_a_killed_command_ends_as_one_undisturbed_and_another_start_does_nothing(folder, alone):
    """Workers must go with a killed parent, and the leases that they held must be free."""
    out, hold = folder / "killed", Hold(folder / "pipe of the command")
    words = command(folder, out, "--workers", "2")

    def kill(commands: list[Any]) -> None:
        hold.next_process(commands[0].sentinel)
        commands[0].kill()

    points = armed(f"job.leased={hold.action}", then=fork_jobs)
    killed = start_ranks(words, None, points, kill, program="tasks.glue")
    assert killed.exit_codes == [-signal.SIGKILL], "it ended by itself, so this proves nothing"
    hold.release()
    run(words)
    assert (rows(out), predictions(out)) == (rows(alone), predictions(alone))
    assert "0 of 2 runs to do" in run(words)


@pytest.mark.slow
def test_bad_data_on_ranks_is_told_once(folder, tmp_path):
    (tmp_path / "data" / "CoLA").mkdir(parents=True)
    for name in ("train", "dev"):
        text = (folder / "data" / "CoLA" / f"{name}.tsv").read_text()
        (tmp_path / "data" / "CoLA" / f"{name}.tsv").write_text(text.replace("\t1\t", "\t7\t", 1))
    words = command(folder, tmp_path / "out", "--data-dir", str(tmp_path / "data"), "--tasks", "CoLA")
    result = start_ranks(words, 2, program="tasks.glue")
    assert 0 not in result.exit_codes
    assert "".join(result.stderr).count("label '7', expected one of 0, 1") == 1
    assert not (tmp_path / "out" / "runs.jsonl").exists()


@pytest.mark.slow
def test_ranks_with_other_runs_are_refused(folder, tmp_path):
    words = command(folder, tmp_path / "out", "--tasks", "CoLA")
    ended = start_ranks(words, 2, program="tasks.glue", last_arguments=["--lr", "0.25"])
    assert ended.exit_codes == [WRONG_ARGUMENTS] * 2, ended.stderr
    assert "-lr0.25-" in "".join(ended.stderr) and "".join(ended.stderr).count("run 1 is CoLA-") == 1


@pytest.mark.slow
def test_two_ranks_train_a_folder_of_hugging_face_on_fewer_rows_than_a_batch(folder):
    few = ("--max-train-examples", "3", "--epochs", "1", "--tasks", "CoLA", "--load", str(folder / "bert"))
    run(command(folder, folder / "few", *few), ranks=2)
    (row,) = rows(folder / "few")
    assert (row["train_examples"], row["steps"]) == (3, 1)


STEPS = 48
BERT = {"name": "BERT (MLM)", "encoding": "absolute", "objective": "mlm"}
SMALL = {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32}
TRAINING = {"micro-batch-size": 4, "global-batch-size": 4, "lr": 1e-3, "eval-iters": 1}


def compare(plan: Path, out: Path, *words: object, **harm: Any) -> Result:
    """Run `python -m tasks.compare`; its jobs are processes of their own. `harm` is for `start_ranks`."""
    return start_ranks([plan, "--output-dir", out, *words], None, program="tasks.compare", **harm)


@pytest.mark.slow
def test_a_comparison_killed_in_a_run_resumes_and_ends_with_its_page(tiny_corpus, tmp_path):
    out, pairs = tmp_path / "out", tmp_path / "pairs"
    words = [word for word in tiny_corpus.vocab_file.read_text().split() if word.isalpha()][-40:]
    rows = [{"sentence_good": " ".join(words[i:][:4]), "sentence_bad": " ".join(words[i::-1][:4])} for i in range(18)]
    for part in range(3):  # paradigms
        json_file(pairs / f"order-{part}.jsonl", rows[part::3])
    values = {
        "models": [BERT, {"name": "DDRP (MTH)", "encoding": "ddrp", "objective": "mth"}],
        "corpus": {"input": [str(tiny_corpus.text_file)], "vocab_file": str(tiny_corpus.vocab_file), "shuffle": True},
        "minimal_pairs": {"data_dir": str(pairs)},
        "analyses": {"self-similarity": 8},
        **{"seeds": 1, "budget": {"steps": STEPS}, "checkpoints": 3, "model": SMALL, "training": TRAINING},
    }
    plan = json_file(tmp_path / "plan.yaml", values)
    hold = Hold(tmp_path / "pipe")

    def kill_in_a_run(drivers: list[Any]) -> None:
        hold.next_process(drivers[0].sentinel)
        drivers[0].kill()
        hold.release()

    compare(plan, out, before=armed(f"step.logged={hold.action}@18"), during=kill_in_a_run)
    began = {row["job"]: row["started"] for row in json_lines(out / "jobs.jsonl")}
    assert not any(name.startswith("course") for name in began), "the kill came too late to test anything"

    compare(plan, out, before=fork_jobs).check()
    rows = json_lines(out / "jobs.jsonl")
    assert len({row["job"] for row in rows}) == len(rows) == 2 + 2 + 2 + 2
    assert {row["job"]: row["started"] for row in rows}.items() >= began.items()  # the dataset was not made again
    assert "resumed from" in "".join(path.read_text() for path in out.glob("logs/course*.log"))
    for folder in out.glob("courses/*"):
        trained = [row["iteration"] for row in read_rows(folder) if "lm_loss" in row]
        assert trained == list(range(1, STEPS + 1)), "a step is missing, or stands there twice"
        assert {path.name for path in folder.glob("iter_*")} >= {f"iter_{n:07d}" for n in (16, 32, 48)}
    page = (out / "page.html").read_text()
    assert "Missing" not in page and page.count("<img") == 5
    gains = json.loads((out / "results.json").read_text())["gains"]
    (difference,) = [x for x in gains if x["measure"] == "minimal pairs" and x["first"] == "DDRP (MTH)"]
    assert difference["over_seeds"] is None and difference["over_items"] is not None
    assert difference["n"] == 1 and difference["judgement"] == "exploratory" and -1 <= difference["mean"] <= 1
    assert len(json_lines(out / "rows.jsonl")) == 2

    seen = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert "0 of 0 jobs to do" in compare(plan, out).check().stdout[0]
    assert seen == {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


@pytest.mark.slow
def test_two_rungs_of_a_plug_in_become_two_rows_that_need_no_folder_and_are_reproduced(tiny_corpus, tmp_path):
    rows = tmp_path / "rows.jsonl"
    values = {
        "plugins": [str(Path(__file__).with_name("plugin_encoding.py"))],
        "models": [{"name": "slopes, MTH", "encoding": "slopes", "objective": "mth"}],
        "rungs": [{"budget": {"tokens": 1024}}, {"budget": {"tokens": 4096}}],
        "corpus": {"data_path": [str(tiny_corpus.prefix)], "vocab_file": str(tiny_corpus.vocab_file)},
        **{"seeds": 1, "checkpoints": 1, "model": SMALL, "training": TRAINING, "workers": 2},
        "analyses": {"direction": 8},
    }
    plan = json_file(tmp_path / "ladder.yaml", values)
    compare(plan, tmp_path / "out", "--rows", rows, before=fork_jobs).check()
    lower, higher = sorted(json_lines(rows), key=lambda row: row["steps"])
    assert (lower["steps"], higher["steps"]) == (8, 32) and lower["planned_tokens"] == 1024
    assert higher["values"]["validation masked-LM loss"] < lower["values"]["validation masked-LM loss"]
    assert 0 <= higher["values"]["direction probe, shuffled"] <= 1
    assert len(higher["curves"]["training masked-LM loss"]) == 32
    assert "1,024 tokens" in (tmp_path / "out" / "page.md").read_text()
    assert "0 of 0 jobs to do" in compare(plan, tmp_path / "elsewhere", "--rows", rows).check().stdout[0]
    assert (tmp_path / "elsewhere" / "page.html").is_file() and not (tmp_path / "elsewhere" / "courses").exists()
    said = compare(plan, tmp_path / "out", "--reproduce", lower["run"], "--rows", rows).check().stdout[0]
    loss = lower["values"]["validation masked-LM loss"]
    assert said.endswith(f"equal to the last digit: 9 of 9 points and the validation loss {loss}\n")
    assert len([*tmp_path.rglob("courses/*")]) == 3
    point = lower["curves"]["training masked-LM loss"][4]
    point[1] = round(point[1] + 1e-5, 5)
    json_file(rows, {key: value for key, value in lower.items() if key != "crc32"})
    words = f"^not equal: 8 of 9 points are; largest difference 1e-05, training masked-LM loss at {point[0]} tokens; "
    refused(words, megatron_ddrp.compare, plan, output_dir=tmp_path / "out", reproduce="course", rows=rows)


EXAMPLES = ROOT / "examples" / "embeddings"
MISSING = [name for name in ("sentence_transformers", "mteb", "accelerate") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"the recipe needs pip install {' '.join(MISSING)}")
@torch.no_grad()
def test_an_export_becomes_a_sentence_encoder_that_mteb_scores(tmp_path, monkeypatch):
    from sentence_transformers import SentenceTransformer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocabulary)
    run = write_checkpoint(tmp_path / "run", tokenizer)
    export_checkpoint(run, tmp_path / "hf")
    both = [(a, b) for a in ("cat", "dog", "bird", "blue") for b in ("cat", "dog", "bird", "blue")]
    rows = [{"sentence1": f"the {a} run", "sentence2": f"red {b}", "score": 5.0 * (a == b) + (a < b)} for a, b in both]
    pairs = json_file(tmp_path / "pairs.jsonl", rows)

    model, _, _ = checkpoint.load_model(run)
    texts = ["the cat", "red dog , blue bird ."]  # the shorter one is padded
    embedded = SentenceTransformer(str(tmp_path / "hf"), trust_remote_code=True).encode(texts)
    for text, found in zip(texts, embedded, strict=True):
        ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]])
        hidden = model.encode(ids, ids * 0, ids * 0 + 1, torch.arange(ids.shape[1])[None])
        torch.testing.assert_close(torch.from_numpy(found), hidden[0].mean(0), atol=1e-5, rtol=1e-5)

    def run_example(name, **flags):
        """Run one of the scripts in this process."""
        words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
        monkeypatch.setattr(sys, "argv", [name, "--pairs", str(pairs), *words])
        with torch.enable_grad():
            run_path(str(EXAMPLES / name), run_name="__main__")

    run_example("train_sentence_encoder.py", load=tmp_path / "hf", output=tmp_path / "sentences", max_seq_length=7)
    trained = SentenceTransformer(str(tmp_path / "sentences"), trust_remote_code=True)
    assert trained.max_seq_length == 7
    first, second = (trained.encode([row[side] for row in rows]) for side in ("sentence1", "sentence2"))
    assert not torch.allclose(torch.from_numpy(trained.encode(texts)), torch.from_numpy(embedded)), "it trained"
    run_example("evaluate_mteb.py", load=tmp_path / "sentences", output=tmp_path / "scores.json")
    cosines = torch.cosine_similarity(torch.from_numpy(first), torch.from_numpy(second))
    expected = spearmanr(cosines, [row["score"] for row in rows]).statistic
    found = json.loads((tmp_path / "scores.json").read_text())["cosine_spearman"]
    assert found == pytest.approx(expected, abs=1e-6)
