"""Estimate of the time in which the host launches a micro-batch: Python, torch's dispatch and CUDA's launches.

The host's times were measured on CPUs as multiples of a plain BERT layer's (`benchmarks/host_time.py`); the launches of
CUDA itself are assumed. A host that nothing makes wait works while the GPU computes, so the longer time counts.
"""

from __future__ import annotations

from megatron_ddrp.config import Config

PLAIN_LAYER_SECONDS = 2e-3
"""CPU time of a plain BERT layer, forward and backward: with it this estimate gives the 119 ms per micro-batch that a
virtual host of an H100 took without graphs (docs/benchmarks.md). A host with faster cores needs less."""

LAYERS = {"graphs": 1.0, "off": 3.1, "on": 4.4, "torch": 4.5}
"""Way of launching → CPU time of a layer in a training step ÷ that of a plain layer: with CUDA graphs, with `--compile`
off and on, and with attention and HCD in torch, as on V100."""

REST = 4.5
"""CPU time of embeddings, head and loss ÷ that of a plain layer."""

LAUNCHES = {"graphs": 2, "off": 70, "on": 50, "torch": 150}
"""Way of launching → launches of kernels or graphs per layer (`benchmarks/gpu_cost.py`)."""

LAUNCH_SECONDS = {"graphs": 15e-6, "off": 3e-6, "on": 3e-6, "torch": 3e-6}
"""Way of launching → assumed CPU time of CUDA's own part in a launch."""


def way_of_launching(config: Config, is_recent: bool, by_torch: bool) -> str:
    """Return the key of `LAYERS`; `is_recent` as in `Device`, `by_torch` if torch computes attention with a bias."""
    if config.parallel.cuda_graphs != "off" and config.graphs_fault is None:
        return "graphs"
    if by_torch and config.objective.cosine_heads(config.model.num_attention_heads):
        return "torch"
    compiles = config.model.compile == "on" or (config.model.compile == "auto" and is_recent)
    return "on" if compiles else "off"


def host_seconds(config: Config, layers: int, is_recent: bool, by_torch: bool) -> float:
    """Return the time in which the host launches one micro-batch of a stage with so many layers."""
    way = way_of_launching(config, is_recent, by_torch)
    of_layer = LAYERS[way] * PLAIN_LAYER_SECONDS + LAUNCHES[way] * LAUNCH_SECONDS[way]
    return layers * of_layer * (4 / 3 if config.parallel.checkpoint_activations else 1) + REST * PLAIN_LAYER_SECONDS
