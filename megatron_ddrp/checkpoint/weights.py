"""The tensors of a checkpoint, and models read from them on one device, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ddrp.checkpoint.choice import MODEL, choose_checkpoint, kind_of
from megatron_ddrp.checkpoint.folder import TOKENIZER, WEIGHTS, tag
from megatron_ddrp.checkpoint.state import HEAD_SETTINGS, WEIGHTS_ONLY, read_state, write_state
from megatron_ddrp.checkpoint.tensor_files import Form, write_tensors
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading


class StoredTensors:
    """Tensors of a checkpoint by name, read one at a time. Raises `UserError` if a file is damaged."""

    def __init__(self, path: Path, kind: str = MODEL) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file in read_state(path).get("files", [WEIGHTS]):
            if kind_of(file) != kind:
                continue
            with reading(path / file):
                stored = safe_open(str(path / file), framework="pt")
                self._files |= dict.fromkeys(stored.keys(), stored)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Any:
        with reading(self.path):
            return self._files[name].get_tensor(name)

    def check(self, names: Iterable[str], shapes: Mapping[str, Iterable[int]]) -> None:
        """Raise `UserError` unless the tensors have exactly these names, and these shapes where `shapes` has them."""
        wrong = sorted(set(names) ^ self.names) or [n for n in shapes if tuple(shapes[n]) != self.shape(n)]
        if wrong:
            raise UserError(f"{self.path} is of another architecture: {wrong[0]} does not fit the configuration")


def load_model(folder: str | Path) -> tuple[Any, Tokenizer, Config]:
    """Load the newest whole checkpoint of a `--save` folder, or one checkpoint, DIR/iter_0001000, as `read_model` does.

    Damaged checkpoints are named on standard error. Raise `UserError` as `choose_checkpoint` does.
    """
    return read_model(choose_checkpoint(Path(folder)))


def read_model(path: Path) -> tuple[Any, Tokenizer, Config]:
    """Return (model on the CPU in fp32 and eval mode, tokenizer, configuration) of one checkpoint.

    Its attention backend becomes `auto` and compilation is off, because the run's settings suited the run's machine.
    """
    from megatron_ddrp.model import build_model

    config = read_config(path).replace(model={"attention_backend": "auto", "compile": "off"})
    model = build_model(config.model, objective=config.objective)
    load_weights(model, path)
    return model.eval(), load_tokenizer(path.resolve().parent / TOKENIZER), config


def read_config(path: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint, with `--rope-theta` of the checkpoint's phase."""
    state = read_state(path)
    config = Config.from_dict(state["config"])
    return config.replace(model={"rope_theta": config.rope_theta_at(state.get("iteration", 0) - 1)})


def persistent_buffers(model: Any) -> dict[str, Any]:
    """Return the buffers that a checkpoint keeps, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load_weights(model: Any, path: Path) -> None:
    """Fill a model from a checkpoint; the checkpoint must hold every tensor in the right shape."""
    stored, own = StoredTensors(path), dict(model.named_parameters()) | persistent_buffers(model)
    stored.check(own, {name: tensor.shape for name, tensor in own.items()})
    for name, tensor in own.items():
        tensor.data.copy_(stored[name])


def save_weights(weights: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write named tensors as PATH/model.safetensors; return its size and sum."""
    return write_tensors(path / WEIGHTS, {name: Form.of(tensor) for name, tensor in weights.items()}, weights.items())


def save_weights_only(
    weights: dict[str, Any], config: Config, folder: Path, head_settings: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write weights that this project did not train, as iteration 0 of a folder; return the checkpoint's path.

    `head_settings` are those of heads that fine-tuning adds, for exports.
    """
    path = folder / tag(0)
    path.mkdir()
    counts = {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0}
    files = {WEIGHTS: save_weights(weights, path)}
    beside = {WEIGHTS_ONLY: True, HEAD_SETTINGS: dict(head_settings)}
    write_state(path, {**counts, **beside, "files": files, "config": config.to_dict()})
    return path
