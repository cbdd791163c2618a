"""Pre-training of BERT-class encoders with DDRP positions and the MTH objective, on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ddrp.commands.functions import (
        compare,
        convert,
        finetune,
        glue,
        merge,
        minimal_pairs,
        plan,
        preprocess,
        pretrain,
        report,
        train_tokenizer,
    )
    from megatron_ddrp.encoders.text_encoder import load_encoder

__all__ = [
    "__version__",
    "compare",
    "convert",
    "finetune",
    "glue",
    "load_encoder",
    "merge",
    "minimal_pairs",
    "plan",
    "preprocess",
    "pretrain",
    "report",
    "train_tokenizer",
]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """Import a function when it is first asked for, since some need torch, which takes seconds to import."""
    if name == "load_encoder":
        from megatron_ddrp.encoders.text_encoder import load_encoder

        return load_encoder
    if name in __all__:
        from megatron_ddrp.commands import functions

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
