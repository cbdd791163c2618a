"""Contents of a `--save` folder, read on one device, without DeepSpeed and without running code from the folder.

    DIR/config.json          resolved configuration          DIR/metrics.jsonl   one row per log or evaluation
    DIR/tokenizer/           the tokenizer of the run        DIR/latest          name of the newest checkpoint
    DIR/lock                 held while a run writes here    DIR/exit_code       0 or 75, if the last run did not fail
    DIR/iter_0001000/
        state.json                          step, counts, sums since the last row of metrics.jsonl, optimizer step,
                                            loss scale, configuration, an imported folder's settings of heads, the
                                            models of a mean, the layout that wrote it, of each file its size and
                                            CRC-32, and its own CRC-32
        weights-00-of-01.safetensors        fp32 weights, whole, by the names of the whole model
        optimizer-00-of-01.safetensors      Adam's moments, `exp_avg/NAME` and `exp_avg_sq/NAME`;
                                            for Muon's matrices `momentum_buffer/NAME`
        beside-00-of-01.safetensors         other training state, such as the notes of rare words

A pipeline writes one pair of files per stage; their union is the model. Nothing in the tensors depends on ranks, ZeRO
or tensor parallelism, so every layout reads the checkpoints of every other. A checkpoint is written under a temporary
name and renamed when complete; `latest` is replaced last. An imported or merged checkpoint is iter_0000000 with
weights only (`WEIGHTS_ONLY`).
"""

from megatron_ddrp.checkpoint.folder import (
    BESIDE,
    HEAD_SETTINGS,
    LATEST,
    MERGED,
    MODEL,
    NEW_HEAD,
    OPTIMIZER,
    ORIGIN,
    STARTED_FROM,
    STATE,
    TOKENIZER,
    WEIGHTS,
    WEIGHTS_ONLY,
    all_checkpoints,
    candidates,
    choose_checkpoint,
    complete,
    fault,
    holds_run,
    is_checkpoint,
    iteration_of,
    last_name,
    mark_latest,
    newest,
    none_complete,
    prune,
    read_state,
    refuse_folders,
    tag,
    whole_checkpoints,
    write_state,
)
from megatron_ddrp.checkpoint.weights import (
    StoredTensors,
    load_model,
    persistent_buffers,
    read_config,
    read_model,
    save_weights,
    save_weights_only,
)
