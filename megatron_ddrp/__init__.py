"""Pre-training of BERT-class encoders with DDRP positions and the MTH objective, on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ddrp.encoders.text_encoder import load_encoder

__all__ = ["__version__", "load_encoder"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `load_encoder` when it is first asked for: it needs torch, which takes seconds to import."""
    if name == "load_encoder":
        from megatron_ddrp.encoders.text_encoder import load_encoder

        return load_encoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
