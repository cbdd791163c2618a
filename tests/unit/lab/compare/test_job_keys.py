"""Names of jobs say what determines a result. Were one to change, finished jobs of earlier folders would run again."""

from __future__ import annotations

import json

import pytest

from megatron_ddrp.lab.compare.experiment import Experiment
from megatron_ddrp.lab.compare.runs import open_store
from tests.unit.lab.compare.conftest import read_plan

PLAN = """
models:
  - {name: BERT, encoding: absolute, objective: mlm}
  - {name: "DDRP, MTH", encoding: ddrp, objective: mth, flags: {hcd-weight: 0.5, direction-init: free}}
half_budget: ["DDRP, MTH"]
seeds: [7, 8]
budget: {tokens: 4096}
checkpoints: 2
corpus: {input: [corpus.txt], vocab_size: 300, shuffle: true}
model: {num-layers: 1, hidden-size: 16, num-attention-heads: 2, seq-length: 32}
training: {micro-batch-size: 4, global-batch-size: 4, lr: 1.0e-3, eval-iters: 1}
glue: {data_dir: glue, tasks: [RTE, CoLA], checkpoints_of: [BERT], seeds: 2}
minimal_pairs: {data_dir: pairs, max_pairs: 5, score: pll}
tasks: [{file: order.yaml, seeds: 1, epochs: [2, 3]}]
analyses: {self-similarity: 8, triangle: 9, attention-maps: 8, space: 8, direction: 8, throughput: [16, 32]}
"""
KEYS = """
course-bert-7-c7ca4901fa37
course-bert-8-64becc54f726
course-ddrp-mth-7-ad038258c6ed
course-ddrp-mth-half-the-budget-7-160d8c64d6ed
attention-maps-bert-seed-7-83b19a18ce64
direction-bert-seed-7-83b19a18ce64
self-similarity-ddrp-mth-seed-7-bdc1564b3936
space-ddrp-mth-seed-8-7692f8975c52
triangle-ddrp-mth-seed-7-5b53d7fa5041
throughput-2-models-seed-7-e965973e3b1a
finetune-order-bert-seed-7-4314c983d583
finetune-order-ddrp-mth-half-the-budget-seed-7-d52c3cf414de
glue-bert-seed-7-step-16-b369b7372e08
glue-bert-seed-7-step-32-91de51dfcdb2
glue-ddrp-mth-half-the-budget-seed-7-step-16-a084b8c7749a
minimal-pairs-bert-seed-7-61e9d7f193b6
minimal-pairs-ddrp-mth-seed-7-ca3316efee8f
vocabulary-bfa4386490a2
dataset-bfa4386490a2
shuffled-bfa4386490a2
"""
"""One or more names of each kind of job of the plan, as finished folders have them."""


@pytest.fixture
def names_of(tmp_path, monkeypatch):
    """Return a function from a plan's text to the names of its jobs. The bytes of its inputs are in the names."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "corpus.txt": "a text of words\n\nanother text\n" * 9,
        "order.yaml": "{train: train.jsonl, valid: train.jsonl, kind: classification}",
        "train.jsonl": '{"text": "a b", "label": "in order"}\n',
        "pairs/order.jsonl": json.dumps({"sentence_good": "a b", "sentence_bad": "b a"}),
        "glue/RTE/train.tsv": "x",
        "glue/CoLA/train.tsv": "y",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def names(text) -> set[str]:
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
        return {job.name for job in Experiment([plan], tmp_path / "out", open_store(tmp_path / "out")).jobs()}

    return names


def test_the_names_of_jobs_stay(names_of):
    found = names_of(PLAN)
    assert found >= set(KEYS.split()) and len(found) == 46
    assert {name.split("-")[0] for name in found} == {name.split("-")[0] for name in KEYS.split()}


def test_a_change_in_the_middle_of_a_task_file_is_another_job(names_of, tmp_path):
    row = '{"text": "a b", "label": "in order"}\n'
    before = names_of(PLAN)
    (tmp_path / "train.jsonl").write_text(row * 100_000)
    long = names_of(PLAN)
    (tmp_path / "train.jsonl").write_text(row * 50_000 + row.replace("a b", "b a") + row * 49_999)
    assert {name.split("-")[0] for name in long ^ names_of(PLAN)} == {"finetune"}
    assert before != long


def test_a_number_of_workers_and_a_baseline_change_no_name(names_of):
    assert names_of(PLAN) == names_of(PLAN + "workers: 2\nbaseline: BERT\n")
