"""Flags of others that are not ours: those of Megatron-LM's BERT scripts with our words, and hints for other habits.

Names have dashes alone. Followed by `=` a flag takes a value. What those of Megatron-LM (2019 to 2026) and of
Megatron-DeepSpeed do was read in their `arguments.py`. `translation.py` reads these tables; docs/megatron.md has them.
"""

from __future__ import annotations

from typing import NamedTuple

WITHOUT_EFFECT = {
    "the loader reads in its own way": "num-workers= mmap-warmup",
    "`--attention-backend` and `--compile` choose the kernels, and none changes a formula": """
        no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-persist-layer-norm
        no-gradient-accumulation-fusion use-flash-attn transformer-impl= use-mcore-models use-legacy-models""",
    "softmax and loss are computed in fp32 in every precision": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "the division by the layer's number was taken back in the softmax": """
        no-query-key-layer-scaling apply-query-key-layer-scaling""",
    "DeepSpeed shards the optimizer and communicates": """
        use-distributed-optimizer overlap-grad-reduce overlap-param-gather distributed-backend= DDP-impl=
        no-async-tensor-model-parallel-allreduce num-layers-per-virtual-pipeline-stage=""",
    "it moves memory; `--checkpoint-activations` is the switch here": """
        recompute-method= recompute-num-layers= recompute-activations checkpoint-num-layers=
        distribute-checkpointed-activations deepspeed-activation-checkpointing partition-activations
        contigious-checkpointing checkpoint-in-cpu synchronize-each-layer""",
    "metrics.jsonl has fixed columns, and TensorBoard has the same": """
        log-params-norm log-num-zeros-in-grad log-throughput timing-log-level= tensorboard-log-interval=
        tensorboard-queue-size= log-timers-to-tensorboard log-batch-size-to-tensorboard
        log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-optimizer-states-to-tensorboard""",
    "wandb reads `WANDB_NAME`, `WANDB_DIR` and `WANDB_ENTITY`": "wandb-exp-name= wandb-save-dir= wandb-entity=",
    "checkpoints have one format, every layout reads it, and nothing random is stored": """
        ckpt-format= use-dist-ckpt async-save no-load-rng no-save-rng""",
    "each rank draws all weights and keeps its part": "use-cpu-initialization",
    "a signal saves and stops every run": "exit-signal-handler",
    "the flags of a resumed run decide its schedule": "override-opt-param-scheduler override-lr-scheduler",
    "the vocabulary is padded to a multiple of 128, and the padding is never predicted": """
        make-vocab-size-divisible-by=""",
    "it is for GPT, also in Megatron-LM": "reset-position-ids reset-attention-mask eod-mask-loss",
}
"""Reason → flags that change no number of a run here, whatever their value."""

RENAMED = {
    "batch-size=": "--micro-batch-size {}",
    "model-parallel-size=": "--tensor-model-parallel-size {}",
    "no-pipeline-parallel": "--pipeline-model-parallel-size 1",
    "norm-epsilon=": "--layernorm-epsilon {}",
    "apply-residual-connection-post-layernorm": "--layernorm-position post",
    "bert-no-binary-head": "--num-segments 0",
    "warmup=": "--lr-warmup-fraction {}",
    "data-cache-path=": "--index-cache-dir {}",
    "cpu-optimizer": "--offload-optimizer cpu",
}
"""Flag → ours, with `{}` for its value."""


class ByValue(NamedTuple):
    """A flag that is taken at some values alone."""

    words: dict[str, str]
    """Value → our words; "" where every run here does just that. Numbers are compared as numbers."""
    otherwise: str | None
    """Why other values are refused; None for a flag of ours, which knows other values itself."""


_ENCODINGS = {"learned_absolute": "absolute", "rope": "rope", "none": "nope"}
BY_VALUE = {
    "data-impl=": ByValue(
        {"mmap": "", "infer": ""}, "only the memory-mapped format is read; preprocess the text again"
    ),
    "dataloader-type=": ByValue({"single": "", "cyclic": ""}, "every epoch is shuffled anew; leave it out"),
    "recompute-granularity=": ByValue({"full": "--checkpoint-activations", "selective": ""}, "expected one of these"),
    "normalization=": ByValue(
        {name: f"--norm {name.lower()}" for name in ("LayerNorm", "layernorm", "RMSNorm", "rmsnorm")},
        "use --norm layernorm or --norm rmsnorm",
    ),
    "position-embedding-type=": ByValue(
        {theirs: f"--position-encoding {ours}" for theirs, ours in _ENCODINGS.items()},
        "use --position-encoding; t5 is the nearest to Megatron-LM's relative",
    ),
    "vocab-extra-ids=": ByValue({"0": ""}, "no piece is added to the tokenizer's; add them to its file"),
    "short-seq-prob=": ByValue({"0": ""}, "no sequence is cut short at random; see --seq-length-phases"),
    "optimizer=": ByValue({"adam": "--optimizer adamw"}, None),
    "attention-backend=": ByValue(
        dict.fromkeys(("flash", "fused", "unfused", "local"), "--attention-backend auto"), None
    ),
    "tokenizer-type=": ByValue(
        dict.fromkeys(("HFTokenizer", "HuggingFaceTokenizer"), "--tokenizer-type HuggingFace"), None
    ),
    "lr-decay-style=": ByValue({"WSD": "--lr-decay-style wsd"}, None),
}

THEIR_DEFAULTS = {
    "position_encoding": "absolute",
    "objective": "mlm, and next-sentence prediction unless --bert-no-binary-head",
    "masking": "ngram",
    "layernorm_position": "pre",
    "layernorm_epsilon": 1e-5,
    "adam_eps": 1e-8,
    "split": "969,30,1",
    "eval_iters": 100,
    "lr_warmup_fraction": 0.0,
    "lr_wsd_decay_style": "exponential, under WSD",
    "global_batch_size": "micro-batch x data-parallel ranks",
}
"""Setting → Megatron-LM's default for BERT, where ours is another."""

_SAME = """
    learning-rate=lr output-dir=save max-steps=train-iters per-device-train-batch-size=micro-batch-size
    per-gpu-train-batch-size=micro-batch-size warmup-steps=lr-warmup-iters num-warmup-steps=lr-warmup-iters
    warmup-ratio=lr-warmup-fraction lr-scheduler-type=lr-decay-style optim=optimizer adam-epsilon=adam-eps
    max-grad-norm=clip-grad logging-steps=log-interval logging-dir=tensorboard-dir save-steps=save-interval
    save-strategy=save-interval save-total-limit=keep-last eval-steps=eval-interval eval-strategy=eval-interval
    evaluation-strategy=eval-interval do-eval=eval-interval resume-from-checkpoint=load
    gradient-checkpointing=checkpoint-activations ddp-timeout=distributed-timeout-minutes mlm-probability=mask-prob
    max-seq-length=seq-length max-length=seq-length num-hidden-layers=num-layers intermediate-size=ffn-hidden-size
    hidden-act=ffn hidden-dropout-prob=hidden-dropout attention-probs-dropout-prob=attention-dropout
    initializer-range=init-method-std layer-norm-eps=layernorm-epsilon type-vocab-size=num-segments
    train-samples=train-iters lr-decay-samples=lr-decay-iters lr-warmup-samples=lr-warmup-iters"""
_DATASET = "make a dataset with megatron-ddrp preprocess, then give"
REMEDIES = {theirs: f"use --{ours}" for theirs, ours in (pair.split("=") for pair in _SAME.split())} | {
    "num-train-epochs": "use --train-iters, the optimizer steps; --dry-run says how many epochs they are",
    "per-device-eval-batch-size": "use --micro-batch-size, which validation shares",
    "train-batch-size": "use --global-batch-size, the sequences of a step over all ranks",
    "rampup-batch-size": "the batch size is constant: give --global-batch-size alone",
    "gradient-accumulation-steps": "use --global-batch-size: --micro-batch-size x data-parallel ranks x these steps",
    "report-to": "use --tensorboard-dir or --wandb-project",
    "run-name": "set WANDB_NAME, with --wandb-project",
    "max-eval-samples": "use --eval-iters, in global batches",
    "overwrite-output-dir": "leave it out; --load with the same folder resumes, and no run overwrites another's",
    "do-train": "leave it out; training is all this command does",
    "torch-compile": "use --compile on",
    "dataloader-num-workers": "leave it out; the loader decides",
    "push-to-hub": "export with megatron-ddrp convert first",
    "model-name-or-path": "import the folder with megatron-ddrp convert --from-hf, then give --load",
    "finetune": "to begin from weights alone, export them and import them: megatron-ddrp convert",
    "config-name": "give --num-layers, --hidden-size and their kin, or --config FILE",
    "tokenizer-name": "use --tokenizer-type HuggingFace --tokenizer-model FOLDER",
    "vocab-size": "the tokenizer's file decides it: leave it out",
    **dict.fromkeys(("train-file", "dataset-name"), f"{_DATASET} --data-path"),
    "validation-file": f"{_DATASET} --valid-data-path",
    "validation-split-percentage": "use --split, such as 95,5,0",
    "fp32": "leave it out; fp32 is the default",
    "num-gpus": "give it to the launcher: deepspeed --num_gpus N --module megatron_ddrp pretrain …",
    "nproc-per-node": "give it to the launcher: torchrun --nproc-per-node N -m megatron_ddrp pretrain …",
}
"""Flag of Hugging Face's Trainer, examples and config.json, or of a launcher → what to do here."""
