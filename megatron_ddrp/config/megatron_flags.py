"""Flags of Megatron-LM's and Megatron-DeepSpeed's BERT scripts that are not ours: the words that stand for them here.

Names have dashes alone. Followed by `=` a flag takes one value, by `=*` any number of them, else none. The flags are
those of the `arguments.py` of Megatron-LM (2019 to 2026) and Megatron-DeepSpeed; what each does was read there.
`config/translation.py` reads these tables, and docs/megatron.md shows them.
"""

from __future__ import annotations

from typing import NamedTuple

WITHOUT_EFFECT = {
    "the loader reads in its own way": """
        num-workers= mmap-warmup no-mmap-bin-files num-dataset-builder-threads= dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap no-create-attention-mask-in-dataloader return-data-index
        mid-level-dataset-surplus=""",
    "`--attention-backend` and `--compile` choose the kernels, and none changes a formula": """
        no-masked-softmax-fusion no-scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion
        no-bias-gelu-fusion no-bias-dropout-fusion no-bias-swiglu-fusion no-rope-fusion no-persist-layer-norm
        disable-mem-efficient-ln no-gradient-accumulation-fusion gradient-accumulation-fusion
        cross-entropy-loss-fusion cross-entropy-fusion-impl= use-flash-attn use-flash-attn-v1 use-flash-attn-v2
        use-flash-attn-triton use-flash-attn-builder transformer-impl= use-mcore-models use-legacy-models
        onnx-safe= ds-fused-adam cpu-torch-adam""",
    "softmax and loss are computed in fp32 in every precision": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "the division by the layer's number was taken back in the softmax": """
        no-query-key-layer-scaling apply-query-key-layer-scaling""",
    "losses are sums over the global batch, divided once": "calculate-per-token-loss",
    "DeepSpeed shards the optimizer and communicates": """
        use-distributed-optimizer distributed-backend= DDP-impl= no-contiguous-buffers-in-local-ddp
        no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p lazy-mpu-init= standalone-embedding-stage
        overlap-p2p-communication no-overlap-p2p-communication overlap-grad-reduce no-overlap-grad-reduce
        overlap-param-gather no-overlap-param-gather overlap-param-gather-with-optimizer-step delay-grad-reduce
        no-delay-grad-reduce no-align-grad-reduce no-align-param-gather ddp-bucket-size= ddp-num-buckets=
        ddp-average-in-collective tp-comm-overlap no-async-tensor-model-parallel-allreduce
        num-layers-per-virtual-pipeline-stage= num-virtual-stages-per-pipeline-rank=
        microbatch-group-size-per-virtual-pipeline-stage= use-tp-pp-dp-mapping nccl-communicator-config-path=
        pipeline-model-parallel-split-rank= decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers=
        enable-zbh1-pipeline enable-zbh1-exact-semantics overlap-p2p-communication-warmup-flush
        no-clone-scatter-output-in-embedding wgrad-deferral-limit= train-sync-interval=
        num-distributed-optimizer-instances= defer-embedding-wgrad-compute disable-gloo-process-groups
        zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size= zero-allgather-bucket-size=""",
    "it moves memory; `--checkpoint-activations` is the switch here": """
        recompute-activations recompute-method= recompute-num-layers= recompute-modules=* checkpoint-num-layers=
        distribute-saved-activations distribute-checkpointed-activations deepspeed-activation-checkpointing
        partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward
        scattered-embeddings split-transformers memory-centric-tiled-linear tile-factor=
        empty-unused-memory-level= use-pin-memory manual-gc manual-gc-interval= no-manual-gc-eval
        optimizer-offload-fraction= overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload""",
    "metrics.jsonl has fixed columns, and TensorBoard has the same": """
        log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy timing-log-level=
        timing-log-option= no-barrier-with-level-1-timing tensorboard-log-interval= tensorboard-queue-size=
        log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard
        log-memory-to-tensorboard log-world-size-to-tensorboard log-loss-scale-to-tensorboard
        no-log-loss-scale-to-tensorboard log-learning-rate-to-tensorboard no-log-learning-rate-to-tensorboard
        no-log-learnig-rate-to-tensorboard log-optimizer-states-to-tensorboard logging-level= enable-one-logger
        no-one-logger one-logger-project= one-logger-run-name= one-logger-async app-tag-run-name=
        app-tag-run-version= config-logger-dir=""",
    "wandb reads `WANDB_NAME`, `WANDB_DIR` and `WANDB_ENTITY`": "wandb-exp-name= wandb-save-dir= wandb-entity=",
    "`--profile` is torch's profiler, of times, on the ranks of the first replica": """
        profile-steps= profile-ranks=* use-pytorch-profiler record-memory-history memory-snapshot-path=""",
    "every step is checked: `--max-skipped-steps`": """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss
        check-for-large-grads check-weight-hash-across-dp-replicas-interval= rerun-mode=""",
    "checkpoints have one format, every layout reads it, and nothing random is stored": """
        ckpt-format= use-dist-ckpt dist-ckpt-format= dist-ckpt-strictness= dist-ckpt-workers=
        auto-detect-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-assume-constant-structure non-persistent-save-interval= non-persistent-ckpt-type=
        non-persistent-global-ckpt-dir= non-persistent-local-ckpt-dir= non-persistent-local-ckpt-algo=
        async-save use-persistent-ckpt-worker universal-checkpoint no-load-rng no-save-rng""",
    "each rank draws all weights and keeps its part": "no-initialization use-cpu-initialization",
    "a signal saves and stops every run": "exit-signal-handler adlr-autoresume adlr-autoresume-interval=",
    "the flags of a resumed run decide its schedule": "override-opt-param-scheduler override-lr-scheduler",
    "the vocabulary is padded to a multiple of 128, and the padding is never predicted": """
        make-vocab-size-divisible-by=""",
    "it is for GPT, T5 or retrieval, also in Megatron-LM": """
        reset-position-ids reset-attention-mask eod-mask-loss merge-file= decoder-num-layers=
        decoder-seq-length= retriever-seq-length=""",
    "only SGD reads it, which is refused": "sgd-momentum=",
    "there is no test run after the training": "test-data-path=*",
}
"""Reason → flags that change no number of a run here, whatever their value."""

RENAMED = {
    "batch-size=": "--micro-batch-size {}",
    "model-parallel-size=": "--tensor-model-parallel-size {}",
    "intra-layer-model-parallel-size=": "--tensor-model-parallel-size {}",
    "no-pipeline-parallel": "--pipeline-model-parallel-size 1",
    "encoder-num-layers=": "--num-layers {}",
    "encoder-seq-length=": "--seq-length {}",
    "norm-epsilon=": "--layernorm-epsilon {}",
    "apply-residual-connection-post-layernorm": "--layernorm-position post",
    "bert-no-binary-head": "--num-segments 0",
    "rotary-base=": "--rope-theta {}",
    "rotary-position-embeddings-theta=": "--rope-theta {}",
    "use-rotary-position-embeddings": "--position-encoding rope",
    "warmup=": "--lr-warmup-fraction {}",
    "data-cache-path=": "--index-cache-dir {}",
    "persistent-save-interval=": "--save-interval {}",
    "save-retain-interval=": "--keep-last 1 --milestone-interval {}",
    "cpu-optimizer": "--offload-optimizer cpu",
    "optimizer-cpu-offload": "--offload-optimizer cpu",
}
"""Flag → ours, with `{}` for its value."""


class ByValue(NamedTuple):
    """A flag that is taken at some values alone."""

    words: dict[str, str]
    """Value → our words; "" where every run here does just that. Numbers are compared as numbers."""
    otherwise: str | None
    """Why other values are refused; None for a flag of ours, which knows other values itself."""


BY_VALUE = {
    "data-impl=": ByValue(
        {"mmap": "", "infer": ""}, "only the memory-mapped format is read; preprocess the text again into it"
    ),
    "dataloader-type=": ByValue({"single": "", "cyclic": ""}, "every epoch is shuffled anew; leave it out"),
    "recompute-granularity=": ByValue(
        {"full": "--checkpoint-activations", "selective": ""}, "expected full or selective"
    ),
    "normalization=": ByValue(
        {
            "LayerNorm": "--norm layernorm",
            "layernorm": "--norm layernorm",
            "RMSNorm": "--norm rmsnorm",
            "rmsnorm": "--norm rmsnorm",
        },
        "use --norm layernorm or --norm rmsnorm",
    ),
    "position-embedding-type=": ByValue(
        {
            "learned_absolute": "--position-encoding absolute",
            "rope": "--position-encoding rope",
            "none": "--position-encoding nope",
        },
        "use --position-encoding; t5 is the nearest to Megatron-LM's relative",
    ),
    "rotary-percent=": ByValue({"1": ""}, "rope turns all of a head; leave it out"),
    "weight-decay-incr-style=": ByValue({"constant": ""}, "--weight-decay is constant here"),
    "lr-warmup-init=": ByValue({"0": ""}, "the warm-up begins at 0 here"),
    "vocab-extra-ids=": ByValue({"0": ""}, "no piece is added to the tokenizer's; add them to its file"),
    "sample-rate=": ByValue({"1": ""}, "every document is used; make a smaller dataset instead"),
    "short-seq-prob=": ByValue({"0": ""}, "no sequence is cut short at random; see --seq-length-phases"),
    "num-experts=*": ByValue({"1": ""}, "there is no mixture of experts"),
    "context-parallel-size=": ByValue({"1": ""}, "sequences are not cut over ranks; see --sequence-parallel"),
    "ds-sequence-parallel-size=": ByValue({"1": ""}, "sequences are not cut over ranks; see --sequence-parallel"),
    "expert-model-parallel-size=": ByValue({"1": ""}, "there is no mixture of experts"),
    "remote-device=": ByValue({"none": ""}, "set zero_optimization.offload_param in --deepspeed-config"),
    "optimizer=": ByValue({"adam": "--optimizer adamw"}, None),
    "attention-backend=": ByValue(
        dict.fromkeys(("flash", "fused", "unfused", "local"), "--attention-backend auto"), None
    ),
    "tokenizer-type=": ByValue(
        dict.fromkeys(("HFTokenizer", "HuggingFaceTokenizer"), "--tokenizer-type HuggingFace"), None
    ),
    "lr-decay-style=": ByValue({"WSD": "--lr-decay-style wsd"}, None),
}

FP16_FILE = {
    "loss-scale=": ("loss_scale", None),
    "initial-loss-scale=": ("initial_scale_power", 2**16),
    "min-loss-scale=": ("min_loss_scale", 1),
    "loss-scale-window=": ("loss_scale_window", 1000),
    "hysteresis=": ("hysteresis", 2),
}
"""Flag of fp16's loss scale → DeepSpeed's name in `fp16` of a file, and the value without one (None: dynamic)."""

ASKS_SETTINGS = (
    "max-position-embeddings=",
    "kv-channels=",
    "accumulate-allreduce-grads-in-fp32",
    "fp32-allreduce",
    "train-samples=",
    "lr-decay-samples=",
    "lr-warmup-samples=",
    *FP16_FILE,
)
"""Flags whose meaning depends on other settings; `translation.py` has a rule for each."""

REFUSED = {
    "vocab-size=": "the tokenizer's file decides it: leave it out",
    "rampup-batch-size=*": "the batch size is constant: give --global-batch-size alone",
    "train-tokens=": "give --train-iters or --train-samples",
    "lr-decay-tokens=": "give --lr-decay-iters",
    "lr-warmup-tokens=": "give --lr-warmup-iters",
    "lr-wsd-decay-samples=": "give --lr-wsd-decay-iters",
    "start-weight-decay=": "--weight-decay is constant here",
    "end-weight-decay=": "--weight-decay is constant here",
    "decoupled-lr=": "all parameters share --lr",
    "decoupled-min-lr=": "all parameters share --min-lr",
    "use-checkpoint-opt-param-scheduler": "the flags of a resumed run decide its schedule: repeat those of the run",
    "use-checkpoint-lr-scheduler": "the flags of a resumed run decide its schedule: repeat those of the run",
    "no-load-lr-state": "the learning rate is a function of the step: give --lr and its kin",
    "reset-iteration": "to begin from weights alone, export them and import them: megatron-ddrp convert",
    "use-checkpoint-args": "give --config DIR/config.json, which holds the settings of the run in DIR",
    "exit-on-missing-checkpoint": "a --load folder without a checkpoint starts afresh and says so: leave it out",
    "finetune": "to begin from weights alone, export them and import them: megatron-ddrp convert",
    "no-load-optim": "to begin from weights alone, export them and import them: megatron-ddrp convert",
    "no-save-optim": "checkpoints hold the optimizer; megatron-ddrp convert exports the weights alone",
    "pretrained-checkpoint=": "import the weights with megatron-ddrp convert, then give --load",
    "ckpt-step=": "give --load DIR/iter_N",
    "load-tag=": "give --load DIR/iter_N",
    "ckpt-convert-format=": "checkpoints have one format; megatron-ddrp convert exports to Hugging Face's",
    "no-position-embedding": "give --position-encoding nope, or rope where positions are rotary",
    "openai-gelu": "GELU is the exact one, without the tanh formula",
    "squared-relu": "choose --ffn gelu or --ffn geglu",
    "swiglu": "the gated block here is --ffn geglu",
    "disable-bias-linear": "--no-bias leaves the biases of LayerNorms out as well: give it if you want that",
    "add-qkv-bias": "linear maps have biases unless --no-bias is given: leave it out",
    "apply-layernorm-1p": "norms multiply by their weight itself: leave it out, the training is the same",
    "untie-embeddings-and-output-weights": "the output layer shares the token embedding",
    "rotary-seq-len-interpolation-factor=": "positions are not scaled; see --rope-theta",
    "use-rope-scaling": "positions are not scaled; see --rope-theta",
    "init-method-xavier-uniform": "weights are drawn from a normal distribution: --init-method-std",
    "data-parallel-random-init": "all ranks begin with the same weights",
    "group-query-attention": "every head has its own keys and values",
    "num-query-groups=": "every head has its own keys and values",
    "num-key-value-heads=": "every head has its own keys and values",
    "qk-layernorm": "queries and keys are not normalised",
    "fp32-residual-connection": "residual sums have the precision of the run: leave out --fp16 or --bf16 for fp32",
    "fp8-format=": "precisions are fp32, --bf16 and --fp16",
    "fp8-hybrid": "precisions are fp32, --bf16 and --fp16",
    "use-torch-fsdp2": "use --zero-stage 3",
    "use-custom-fsdp": "use --zero-stage 3",
    "use-megatron-fsdp": "use --zero-stage 3",
    "kd": "nothing is distilled",
    "mos": "nothing is distilled",
    "spec=*": "the model is that of --num-layers and its kin",
    "train-idx-path=": "the order of the samples follows from --seed",
    "train-doc-idx-path=": "the order of the samples follows from --seed",
    "train-sample-idx-path=": "the order of the samples follows from --seed",
    "train-shuffle-idx-path=": "the order of the samples follows from --seed",
    "random-ltd": "no token is dropped from layers",
    "curriculum-learning-legacy": "see --seq-length-phases",
    "data-efficiency-curriculum-learning": "see --seq-length-phases",
    "train-data-exact-num-epochs=": "give --train-iters; --dry-run says how many epochs that is",
    "per-split-data-args-path=": "give --train-data-path and --valid-data-path",
    "data-args-path=": "give --data-path",
    "mock-data": "give --data-path; megatron-ddrp preprocess makes a small one in seconds",
    "skip-train": "give --train-iters",
    "kill-switch-file=": "SIGTERM or --exit-duration-in-mins save and stop a run",
    "deterministic-mode": "a resumed run repeats the run, on GPUs but for rounding: leave it out",
    "yaml-cfg=": "give --config FILE.yaml",
}
"""Flag → the reason or what to use instead."""

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
