"""The contract of a family of encoders of transformers, and the reading, writing and checks that all families share.

`Family` says how to add a family. Of a folder, this file reads config.json, and it refuses a damaged export of ours; of
an export it writes the output folder whole or not at all, and compares the result with the training model.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_ddrp.checkpoint.folder import look_inside
from megatron_ddrp.config import STARTS, ModelConfig, ObjectiveConfig, flag
from megatron_ddrp.config.reading import refuse
from megatron_ddrp.config.registry import ENCODINGS, PLUGINS
from megatron_ddrp.data.atomic import atomic_folder, file_facts, file_fault
from megatron_ddrp.data.tokenizers.tokenizer import SPECIAL_PIECES, Tokenizer
from megatron_ddrp.errors import UserError, need_packages, refusals_as_user_errors
from megatron_ddrp.foreign import Name, misfit, quiet_transformers, read_object, show
from megatron_ddrp.model import Encoder

TOLERANCE = 1e-4
"""Largest allowed difference of a hidden state, relative to the largest one; fp32 rounding gives about 1e-6."""
LONGEST = 128
"""Largest number of compared tokens per row."""


Scores = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Function from last hidden states `[batch, seq, hidden]` to a head's scores, by transformers' names of outputs."""


def check_export(folder: Path, class_name: str, model: Encoder, tokenizer: Tokenizer, scores: Scores) -> str:
    """Load the class `class_name` from a written folder, compare it with the model, and return a line for the user.

    Hidden states and scores of tokens are compared outside the padding. Raise `UserError` if the folder cannot be
    loaded or computes something else. Without transformers, raise it for a plug-in's encoding; other folders are then
    not checked, since the tests load every built-in encoding.
    """
    config = model.config
    if ENCODINGS[config.position_encoding] in PLUGINS:
        need_packages("the check of the export of a plug-in's encoding", "transformers")
    if find_spec("transformers") is None:
        return "not checked: transformers is not installed"
    inputs = probe_rows(min(config.seq_length, LONGEST), tokenizer.pad_id, config.vocab_size, config.num_segments)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    segments = inputs.get("token_type_ids", torch.zeros_like(ids))
    try:
        with torch.no_grad(), quiet_transformers():
            loaded, report = exported_class(folder, class_name).from_pretrained(folder, output_loading_info=True)
            output = loaded.eval()(**inputs, output_hidden_states=True)
    except Exception as error:  # a plug-in's code may raise any error
        raise UserError(f"the exported model cannot be loaded: {type(error).__name__}: {error}") from error
    has_head = any(name.endswith("logits") for name in output)  # else the encoder's class ignores the head's weights
    missing = {name for name in report["missing_keys"] if has_head or not name.startswith("pooler.")}  # of a BertModel
    if strange := sorted({*missing, *(report["unexpected_keys"] if has_head else ())}):
        raise UserError(f"the exported model does not fit its weights: {strange[0]} and {len(strange) - 1} more")
    valid = mask.bool()
    with torch.no_grad():
        hidden = model.encode(ids, segments, mask, torch.arange(ids.shape[1]) * mask)
        gaps = {"hidden states": _gap(output.hidden_states[-1][valid], hidden[valid])}
        for name, expected in scores(hidden).items() if has_head else ():
            compared = valid if expected.shape[:2] == valid.shape else ...  # everything, if there is one score per row
            gaps[name.replace("_", " ")] = _gap(output[name][compared], expected[compared])
    for what, gap in gaps.items():
        if not gap <= TOLERANCE:
            raise UserError(
                f"the exported model's {what} differ from the checkpoint's by {gap:.1e} of the largest: an encoding "
                "may depend only on its settings, its weights and the positions"
            )
    found = " and ".join(f"its {what} differ by {gap:.1e}" for what, gap in gaps.items())
    return f"loaded by {class_name}; {found} of the largest"


def probe_rows(seq: int, pad: int, vocab_size: int, num_segments: int) -> dict[str, Tensor]:
    """Return two rows of `seq` pieces, one of them padded, as keyword arguments `[2, seq]` for a model of transformers.

    `pad` is the id of padding. A model of fewer than two segments gets none.
    """
    place = torch.arange(seq)
    mask = (place < torch.tensor([[seq], [seq // 2 + 1]])).long()
    ids = place * torch.tensor([[1], [2]]) % vocab_size
    ids = torch.where(ids == pad, (pad + 1) % vocab_size, ids)  # RoBERTa counts positions over non-padding ids
    segments = {"token_type_ids": (place >= seq // 3).long() * mask} if num_segments > 1 else {}
    return {"input_ids": torch.where(mask > 0, ids, pad), "attention_mask": mask, **segments}


def _gap(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, relative to the largest of our values."""
    return (theirs - ours).abs().max() / ours.abs().max()


def exported_class(folder: Path, class_name: str) -> Any:
    """Return a class from a folder's own code if it has any, else from transformers."""
    code = folder / "modeling_ddrp.py"
    if not code.exists():
        return getattr(importlib.import_module("transformers"), class_name)
    # A package whose modules are the folder's files, so that they can import one another relatively.
    spec = spec_from_file_location(f"exported_{uuid.uuid4().hex}", code, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None, code
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return getattr(module, class_name)


SUMS = "export_sums.json"
CARD = "README.md"
"""The model card, which people edit."""


FACTS: Any = {"bytes": int, "crc32": str}
"""Key of the facts about a file → type hint of its value."""


def write_sums(folder: Path) -> None:
    """Write size and CRC-32 of every file of a complete export that we read: all but its model code and its card.

    transformers ignores the file of sums.
    """
    read = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".py" and path.name != CARD]
    files = {path.relative_to(folder).as_posix(): file_facts(path) for path in read}
    (folder / SUMS).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def check_sums(folder: Path, only: str | None = None) -> None:
    """Raise `UserError` if an export, or its file `only`, has changed since it was written.

    Folders without sums, as other programs write them, are accepted.
    """
    if not (folder / SUMS).exists():
        return
    files = read_object(folder / SUMS).get("files")
    if misfit(files, Mapping[str, FACTS]) or not files:
        raise UserError(f"{folder / SUMS}: it holds no sums; export the checkpoint again")
    for name, written in files.items():
        if only in (None, name) and (reason := file_fault(folder / name, written)):
            raise UserError(
                f"{folder}: {reason}: damaged or changed since its export; export the checkpoint again, or delete "
                f"{SUMS} if you changed the folder yourself"
            )


def refuse_output(output: Path, overwrite: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    """Raise `UserError` before any work if `output` must not be replaced; an empty folder may be used.

    `replaceable` returns whether `--overwrite` may replace a folder; `kind` describes such folders in words.
    """
    if Path.cwd().is_relative_to(output.resolve()):
        refuse(
            f"--output {output} is or holds the current folder, which cannot be replaced: give the name of a new one"
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        refuse(f"--output {output} exists: choose another name, or give --overwrite")
    if not replaceable(output):
        refuse(f"--output {output} is not {kind}, and --overwrite replaces nothing else: choose another name")


@contextmanager
def whole_folder(output: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Provide a new folder of weights to write into, as `atomic_folder` does; its `check` runs before the renaming."""
    try:
        with refusals_as_user_errors(output), atomic_folder(output, check) as folder:
            yield folder
    except Exception as error:  # tokenizers raises no class of its own for a full disk
        if isinstance(error, UserError) or not (isinstance(error, SafetensorError) or "os error" in str(error)):
            raise
        raise UserError(f"--output {output}: cannot be written: {error}") from None


OWN_MODEL_TYPE = "megatron_ddrp"
"""`model_type` of folders for our own classes. The model code in them is for users of transformers."""
READ_AS_DATA = (OWN_MODEL_TYPE, "eurobert", "nomic_bert")
"""Model types whose folders name code that is not needed: transformers has their classes, or we have."""
LARGEST_SIZE = 2**22
"""Largest width, vocabulary or length that is accepted."""

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "max_position_embeddings": "seq_length",
    "initializer_range": "init_method_std",
    "layer_norm_eps": "layernorm_epsilon",
}
"""Key of config.json in every folder → field of `ModelConfig`."""
OWN_SETTINGS = (
    *("layernorm_position", "position_encoding", "relative_distance", "relative_table", "direction_init"),
    *("rope_theta", "local_rope_theta", "absolute_embedding", "deberta_emd", "ffn", "norm", "bias", "key_bias"),
    *("first_norm", "local_attention", "global_every", "embedding_size", "num_segments", "norm_bias", "embedding_norm"),
)
"""Fields of `ModelConfig` that our own exports also have in config.json, under their own names."""


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, read as data: the code that it names never runs.

    Raise `UserError` if it cannot be read, if the model needs foreign code or weights in a file of another name, or if
    an export of ours has changed since it was written.
    """
    check_sums(folder)
    path = folder / "config.json"
    if not path.is_file() and (advice := look_inside(folder)):
        raise UserError(f"{path}: no such file; {advice}")
    values = read_object(path)
    if file := values.get("transformers_weights"):
        raise UserError(f"{path}: transformers_weights is {show(file)}; rename that file to model.safetensors instead")
    if values.get("model_type") not in READ_AS_DATA:
        refuse_code(path, values)
    return values


def model_type(path: Path, values: Mapping[str, Any]) -> str:
    """Return `model_type` of a config.json. Raise `UserError` if it is missing, or not the name of a family."""
    kind: Any = values.get("model_type")
    if kind is None and "checkpoint" in values:
        raise UserError(f"{path.parent}: a run; export it first: convert --load {path.parent} --output EXPORT")
    if misfit(kind, Name):
        found = f"is {show(kind)}" if "model_type" in values else "is missing"
        raise UserError(f"{path}: model_type {found}, expected the name of the model's family, such as bert")
    return kind


def refuse_code(path: Path, values: dict[str, Any]) -> None:
    """Raise `UserError` if a configuration file names Python code, in the folder or elsewhere."""
    kernel = values.get("attn_implementation") or values.get("_attn_implementation")
    if values.get("auto_map") or (isinstance(kernel, str) and "/" in kernel):
        key = "auto_map" if values.get("auto_map") else "attn_implementation"
        raise UserError(
            f"{path}: {key} names code outside transformers, and code of a folder is never run here; give a folder "
            "with a model that transformers itself contains"
        )


def read_settings(path: Path, values: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of `ModelConfig`, read from the given keys (→ fields) of config.json.

    Raise `UserError` for a value of the wrong type.
    """
    known = {field.name: field for field in fields(ModelConfig)}
    settings: dict[str, Any] = {}
    for key, name in keys.items():
        rules, kind = known[name].metadata, str(known[name].type).partition(" ")[0]
        least = 0 if rules.get("within", "").startswith("[0") else 1
        hint: Any = {"bool": bool, "float": Annotated[float, "[0, inf)"]}.get(kind, whole_number(least))
        hint = tuple(rules.get("choices", ())) or hint
        can_be_null = key in values and known[name].default is None
        settings[name] = setting(path, values, key, (hint, None) if can_be_null else hint)
    return settings


def model_config(path: Path, settings: dict[str, Any]) -> ModelConfig:
    """Return the settings as a `ModelConfig`. Its errors name the file `path`, not a flag."""
    try:
        config = ModelConfig(**settings)
        usual = ModelConfig(**settings | {"ffn_hidden_size": None})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return usual if usual.ffn_size == config.ffn_size else config


def whole_number(least: int = 1, most: int = LARGEST_SIZE) -> Any:
    """Return the type hint of a whole number in a range, by default of a size."""
    return Annotated[int, f"[{least}, {most}]"]


def setting(path: Path, values: Mapping[str, Any], key: str, hint: Any) -> Any:
    """Return a setting of config.json. Raise `UserError` for a value that does not fit a type hint of `misfit`."""
    if reason := misfit(values.get(key), hint):
        others = ", or a name from --plugin FILE.py" if key == "position_encoding" else ""
        raise UserError(f"{path}: {key} is {show(values.get(key))}, {reason}{others}")
    return values.get(key)


def refuse_other_head_size(path: Path, values: dict[str, Any], key: str) -> None:
    """Raise `UserError` if `key` gives attention heads another width than the hidden size has for each."""
    width, heads = (setting(path, values, name, whole_number()) for name in ("hidden_size", "num_attention_heads"))
    if values.get(key) not in (None, width // heads):
        raise UserError(
            f"{path}: {key} is {show(values[key])}, which is not supported: need hidden_size / num_attention_heads"
        )


class HeadNames(NamedTuple):
    """Head of an exported model."""

    name: str
    """Suffix of the names of its classes, BertFor… or our own DdrpFor…"""
    auto: str
    """Suffix of the class of transformers that loads it, AutoModelFor…"""


HEADS = {
    "masked-lm": HeadNames("MaskedLM", "MaskedLM"),
    "replaced-token": HeadNames("PreTraining", "PreTraining"),
    "contextual-replaced-token": HeadNames("ContextualPreTraining", "PreTraining"),
}
"""`exported` of an objective → head of its models."""
BARE = "none"
"""Head of an export that is an encoder alone; no key of `HEADS`."""

NOT_COMPARED = {
    *("attention_backend", "compile", *STARTS),
    *("global_every", "first_norm", "relative_distance", "rope_theta", "local_rope_theta"),
}
"""Fields of `ModelConfig` that every family accepts, in addition to those in its `sizes`: settings of the computation
and of the start, and fields that act only together with a compared field (`global_every` with `local_attention`). Of a
new field, a family accepts only the default."""

NO_SETTINGS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "finetuned")
"""Keys of config.json that do not change the encoder's results in fp32."""

SHARED_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
"""Values that transformers uses for an absent key in most families."""

SHARED_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),  # its weights are codes, of the same shapes
}
"""Keys that change the computation of every family → values that we support, transformers' default first."""

NUMBER = (float,)
DROPOUT = (float, None)
CLASSIFIER_DROPOUT: dict[str, tuple[Any, ...]] = {"classifier_dropout": DROPOUT}

EXACT_GELU = ("gelu", "gelu_python")
"""Names of the activation in our feed-forward block. "gelu_new" is an approximation of it, so it is not included."""

Table = Mapping[str, Any]
NOTHING: Table = MappingProxyType({})


class Family:
    """A kind of model that transformers knows by its `model_type`, and how its folders store settings and weights.

    The contract holds in both directions. A new family is one class in this folder and one line in `__init__.py`. Most
    of it is tables:

    - `defaults` and `followed`: the meaning of an absent key of config.json, and the values that our encoder supports;
    - `head_keys`: the keys that act only in heads that fine-tuning adds, which exports have again;
    - `fields`: the values of `ModelConfig` with which our encoder computes the same, so that a trained model can be
      exported;
    - `modules` and `head_modules`: names of weights.

    Methods do the rest: `settings` and `folder_settings` for config.json, `from_folder` and `to_folder` for tensors
    that folders store differently (fused, split, with more rows). The tests and `benchmarks/parity.py` find every
    family in the registry and compare it with transformers in both directions.
    """

    model_type: str
    class_name: str
    """Prefix of its class names in transformers, and its name in messages."""

    sizes: Mapping[str, str] = MappingProxyType(SIZES)
    """Key of config.json → field of `ModelConfig`; the family supports every value of these fields."""
    defaults: Table = NOTHING
    """Values that transformers uses for an absent key, in addition to `SHARED_DEFAULTS`."""
    followed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Key of config.json that changes the computation → values that we support, transformers' default first."""
    head_keys: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Key of config.json that acts only in the heads that fine-tuning adds, or when a weight is drawn → values or types
    that it may have."""
    fields: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """Field of `ModelConfig` → values with which a model belongs to this family, the usual one first. A field that is
    neither here nor in `sizes` nor in `NOT_COMPARED` must have its default."""
    training: Table = NOTHING
    """Settings of `ObjectiveConfig` under which the family's models were trained."""
    has_code = False
    """True if `write_code` writes code, which transformers runs only with `trust_remote_code=True`."""

    @property
    def trust(self) -> str:
        """Further argument of `from_pretrained` for its folders, after a comma; often empty."""
        return ", trust_remote_code=True" if self.has_code else ""

    prefix: str
    """Prefix of the names of the encoder's weights, such as "bert."; a folder of a bare encoder has none."""
    layers = "encoder.layer"
    """Name of the list of layers, after `prefix`."""
    modules: Mapping[str, str]
    """Our module → their module, after `prefix`; modules of a layer are named without `layers` and number."""
    head_modules: Mapping[str, Mapping[str, str]]
    """Key of `HEADS`, for each head that its folders may have → our module → their module, without `prefix`."""
    task_head: Table | None = None
    """Names in its folders of a pooled `TaskHead`'s layers that differ from ours; None if its classes in transformers
    compute another head. All families use our names for heads on pieces."""
    bare_heads: tuple[str, ...] = ()
    """Keys of `head_modules` for which transformers has no class; it loads such a folder as a bare encoder."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """Our whole name → their name after `prefix`, for weights that are a module's on one side and bare on the other."""
    more_modules: Mapping[str, str] = MappingProxyType({})
    """Their further modules in some folders → ours."""

    # ---- from a folder

    def complete(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return config.json with the keys that it lacks. Raise `UserError` for a value that we do not support."""
        followed = {**SHARED_FOLLOWED, **self.followed}
        usual = {key: allowed[0] for key, allowed in followed.items()}
        values = {**usual, **SHARED_DEFAULTS, **self.defaults, **values}
        _refuse_others(path, values, followed)
        return values

    def head_settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of heads that fine-tuning adds, for an export to have again.

        Raise `UserError` for a value that transformers does not know.
        """
        found = {key: values[key] for key in self.head_keys if key in values}
        _refuse_others(path, found, self.head_keys)
        return {
            key: float(value) if float in self.head_keys[key] else value
            for key, value in found.items()
            if value is not None  # as an absent key
        }

    def padding_id(self, values: dict[str, Any]) -> int | None:
        """Return the id that gets no position of its own in transformers; None in a family without such an id."""
        return None

    def check_tokenizer(self, path: Path, values: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Raise `UserError` if a piece of a text may have the id that gets no position of its own."""
        padding, piece = self.padding_id(values), tokenizer.pieces[tokenizer.pad_id]
        roles = [role for role in SPECIAL_PIECES if getattr(tokenizer, f"{role}_id") == padding]
        if padding is not None and roles != ["pad"]:
            raise UserError(
                f"{path}: pad_token_id is {padding}, but its tokenizer pads with {tokenizer.pad_id} ({show(piece)}): "
                "transformers gives every token with pad_token_id the position of padding, so it must be the padding "
                "and no other piece; put the tokenizer of the model's training into the folder, or correct pad_token_id"
            )

    def model_config(self, path: Path, values: dict[str, Any]) -> ModelConfig:
        """Return the configuration of a completed config.json. Raise `UserError` for an impossible size."""
        return model_config(path, self.settings(path, values))

    def settings(self, path: Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelConfig`: those of `sizes`, the segments, and the usual values of `fields`."""
        usual = {name: allowed[0] for name, allowed in self.fields.items()}
        segments = {"num_segments": values["type_vocab_size"]} if "type_vocab_size" in self.followed else {}
        return {**usual, **segments, **read_settings(path, values, self.sizes)}

    def objective(self, path: Path, values: dict[str, Any], names: Iterable[str]) -> ObjectiveConfig:
        """Return the objective with which training of a folder's model resumes; `names` are its weights' names."""
        return ObjectiveConfig("mlm", **self.training)

    def our_name(self, name: str) -> str | None:
        """Return our name of a weight, with or without `prefix`, or None if our model has no such weight.

        Folders converted from TensorFlow call the weights of LayerNorms gamma and beta.
        """
        name = name.removeprefix(self.prefix)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        whole = {theirs: ours for ours, theirs in self.parameters.items()}.get(name)
        if whole is not None:
            return whole
        layer = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        module, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
        ours = self._ours.get(module)
        return None if ours is None else f"{f'layers.{layer[1]}.' if layer else ''}{ours}.{kind}"

    def from_folder(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        """Return a folder's tensors, under its names, in our layout. Raise `UserError` if that is impossible."""
        return tensors

    # ---- to a folder

    def refusal(self, config: ModelConfig, head: str) -> str | None:
        """Return the reason why a model does not belong to this family, or None if it does."""
        if head not in (BARE, *self.head_modules):
            return f"its head is {head}, and {self.class_name} has {' or '.join(self.head_modules)}"
        default = ModelConfig(position_encoding=config.position_encoding)
        free = {*NOT_COMPARED, *self.sizes.values()}
        for name in dict.fromkeys((*self.fields, *(f.name for f in fields(ModelConfig) if f.name not in free))):
            value, allowed = getattr(config, name), self.fields.get(name, (getattr(default, name),))
            if value not in allowed:
                expected = " or ".join(map(str, allowed))
                return f"{flag(name)} is {value}, and {self.class_name} has {expected}"
        return None

    def fits(self, config: ModelConfig, tokenizer: Tokenizer) -> bool:
        """Return whether a model that belongs to this family is exported as such if the user names no family."""
        return True

    def folder_settings(self, config: ModelConfig, head: str, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the content of config.json, with every key that affects the computation."""
        return {
            "model_type": self.model_type,
            "architectures": [self.classes(head)[0]],
            **{key: getattr(config, name) for key, name in self.sizes.items()},
            "intermediate_size": config.ffn_size,
            "hidden_act": "gelu",
            "type_vocab_size": config.num_segments,
            "tie_word_embeddings": True,
            "pad_token_id": tokenizer.pad_id,
            "torch_dtype": "float32",
        }

    def classes(self, head: str) -> tuple[str, str]:
        """Return the class that a folder with `head` names, and the class of transformers with which users load it."""
        if head in (BARE, *self.bare_heads):
            return f"{self.class_name}Model", "AutoModel"
        return f"{self.class_name}For{HEADS[head].name}", f"AutoModelFor{HEADS[head].auto}"

    def their_name(self, name: str, head: str) -> str:
        """Return the folder's name of our weight `name`, in a model with `head`."""
        if name in self.parameters:
            return self.prefix + self.parameters[name]
        layer, inside = "", name
        if name.startswith("layers."):
            _, number, inside = name.split(".", 2)
            layer = f"{self.layers}.{number}."
        module, _, kind = inside.rpartition(".")
        if module in self.head_modules.get(head, ()):
            return f"{self.head_modules[head][module]}.{kind}"
        return f"{self.prefix}{layer}{self.modules[module]}.{kind}"

    def to_folder(self, tensors: dict[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        """Return tensors, under the folder's names, in the folder's layout."""
        return tensors

    def write_code(self, folder: Path, config: ModelConfig) -> None:
        """Write the code that such a folder needs in addition to transformers; by default none."""

    @cached_property
    def _ours(self) -> dict[str, str]:
        tables = (self.modules, *self.head_modules.values())
        return {theirs: ours for table in tables for ours, theirs in table.items()} | dict(self.more_modules)


def _refuse_others(path: Path, values: Table, followed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UserError` for a value that is neither one of its key's choices nor of one of the types among them."""
    for key, value in values.items():
        if key in followed and (reason := misfit(value, followed[key])):
            raise UserError(f"{path}: {key} is {show(value)}, which is not supported: {reason}")
