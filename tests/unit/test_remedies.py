"""Remedies that each command names when memory runs out."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_ddrp.config import Config
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis import command as commands
from megatron_ddrp.memory import estimated_needs, need_less_memory
from megatron_ddrp.tasks.finetune import workers as sweep
from megatron_ddrp.tasks.minimal_pairs import scoring
from megatron_ddrp.tasks.minimal_pairs.pairs import PairJob

SMALL = Config().replace(model={"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "seq_length": 64})


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB")


@pytest.mark.parametrize(
    ("device", "training", "parallel", "named", "absent"),
    [
        ("cpu", {}, {}, "--micro-batch-size 16 instead of 32, --checkpoint-activations, ", "--offload"),
        ("cuda", {}, {"zero_stage": 1}, "--offload-optimizer cpu", "--zero-stage 1 instead"),
        ("cuda", {"micro_batch_size": 1}, {"checkpoint_activations": True}, "use --zero-stage ", "--micro"),
        ("cuda", {}, {"offload_optimizer": "cpu"}, "or more ranks", "--offload"),
    ],
)
def test_a_run_is_told_its_estimate_and_what_lowers_it(
    device: str, training: dict[str, Any], parallel: dict[str, Any], named: str, absent: str
) -> None:
    config = SMALL.replace(training={"micro_batch_size": 32, "global_batch_size": 256, **training}, parallel=parallel)
    setup = Setup.planned(config, 8, device)
    text = need_less_memory(setup)
    assert named in text and absent not in text, text
    needed = estimated_needs(setup)[config.parallel.zero_stage]
    assert text.startswith(f"a rank needs about {needed.total / 2**30:,.1f} GiB by estimate, ")


def test_a_fine_tuning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Namespace(task="RTE", encoder="e", micro_batch_size=16, max_seq_length=128)
    monkeypatch.setattr(sweep, "build_model", no_memory)
    here = Namespace(data={"RTE": Namespace(task=None)}, encoders={"e": None}, device=None)
    with pytest.raises(
        UserError, match="2.00 GiB.*; use --micro-batch-size 8 instead of 16, --max-seq-length below 128"
    ):
        sweep.Sweep.finetune(here, run, None, {})  # type: ignore[arg-type]


def test_a_scoring_of_pairs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PairJob("fingerprint", None, "uid", "digest", "l2r")
    monkeypatch.setattr(scoring, "encode_pairs", lambda *_: ([[5]], [[6]]))
    monkeypatch.setattr(scoring, "score_sentences", no_memory)
    monkeypatch.setattr(scoring.Scorer, "model", lambda *_: None)
    subject = Namespace(tokenizer=None, max_length=8)
    plan = Namespace(subjects={("fingerprint", None): subject}, paradigms={"uid": None})
    plan.options = Namespace(tokens_per_batch=512)
    scorer = scoring.Scorer(plan, torch.device("cpu"), print)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="; use --tokens-per-batch 256 instead of 512, or fewer --workers"):
        scorer.perform(job)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("triangle --load run --data-path d --output f.png --batch-size 8", "use --batch-size 4 instead of 8"),
        ("throughput --load run --output f.json", "use a smaller --tokens"),
        ("notes --load run", "use a machine with more memory"),
    ],
)
def test_an_analysis_is_told(words: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ddrp.lab.analysis import reports

    monkeypatch.setattr("sys.argv", ["analyze.py", *words.split()])
    for name in ("report_triangles", "report_throughput", "report_notes"):
        monkeypatch.setattr(reports, name, no_memory)
    with pytest.raises(UserError, match=f"^out of memory: Tried to allocate 2.00 GiB.*; {advice}$"):
        commands.main()
