"""Plain modules on one device: no DeepSpeed, no torch.distributed, no files."""

from megatron_ddrp.model.bert import (
    ENCODER_PARTS,
    Bert,
    Electra,
    Encoder,
    build_model,
    count_parameters,
    on_meta_device,
)

__all__ = ["ENCODER_PARTS", "Bert", "Electra", "Encoder", "build_model", "count_parameters", "on_meta_device"]
