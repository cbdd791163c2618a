"""Every setting of a run: one frozen dataclass per concern. Command line, help and YAML are derived from them.

A field made by `option(...)` is a flag, and the docstring of its dataclass is the title of its section in `--help`.
Impossible pairs are refused in `__post_init__` of the dataclass that has both settings; pairs across two dataclasses in
`Config` (run.py).
"""

from megatron_ddrp.config.model import STARTS, VOCABULARY_MULTIPLE, ModelConfig
from megatron_ddrp.config.objective import CheckpointConfig, DataConfig, LoggingConfig, ObjectiveConfig
from megatron_ddrp.config.reading import Number, flag, flag_words
from megatron_ddrp.config.registry import ENCODINGS, OBJECTIVES, encoding_class, load_plugin, objective_class
from megatron_ddrp.config.run import Config, changed_model, changed_settings, concerns, load_config, save_config
from megatron_ddrp.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
