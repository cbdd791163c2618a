"""Pre-training of BERT-class encoders with DDRP positions and the MTH objective, on DeepSpeed."""

__version__ = "0.1.0"
