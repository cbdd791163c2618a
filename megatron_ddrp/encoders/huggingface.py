"""Encoders from Hugging Face folders, with the weights that our own reader finds, and hidden states of their layers.

Code in a folder is never run, even if its config.json asks for it: our classes load exports with model code of ours,
and the classes of transformers load all other folders.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.contract import OWN_MODEL_TYPE, setting, whole_number
from megatron_ddrp.conversion.model_code import HeadForm, Labels
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer
from megatron_ddrp.conversion.weight_files import read_weights, refuse_homeless
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError, allocations_as_user_errors, need_packages
from megatron_ddrp.foreign import quiet_transformers, read_object, reading
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.stages import Draws, Inputs


class Filled(NamedTuple):
    """Account of a folder's weights in a model."""

    missing: set[str] = set()
    """Names of the model's weights that the folder lacks."""
    unused: set[str] = set()
    """Names of the folder's weights that the model does not use."""


def fill(folder: Path, config: Any, build: Callable[[Any], Any], finite: bool = True) -> tuple[Any, Filled]:
    """Return the model that `build` makes of `config` with a folder's weights, and an account of them.

    Raises:
        UserError: the weights cannot be read, one has another shape than the model's, two values, or no place in the
            encoder. With `finite`, also if a number is not finite.
    """
    with torch.device("meta"):
        empty = build(config)
    base = f"{empty.base_model_prefix}."
    tensors = _with_word_embedding(read_weights(folder, finite), config, base)
    for name in sorted(tensors.keys() & {name.removeprefix(base) for name in tensors if name.startswith(base)}):
        if not torch.equal(tensors[name].float(), tensors[base + name].float()):
            raise UserError(f"{folder}: {name} and {base}{name} have different values; copy the folder again")
    places = empty.state_dict()
    for name, tensor in sorted(tensors.items()):  # before transformers makes room for what does not fit
        place = next((places[key] for key in (name, base + name, name.removeprefix(base)) if key in places), tensor)
        if place.shape != tensor.shape:
            raise _misfit(folder, name, tensor.shape, place.shape)
    model, report = type(empty).from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name, theirs, ours in sorted(report["mismatched_keys"]):
        raise _misfit(folder, name, theirs, ours)
    unused = set(report["unexpected_keys"])
    refuse_homeless(model.base_model.state_dict(), unused, base, folder)
    return model, Filled(set(report["missing_keys"]), unused)


def _misfit(folder: Path, name: str, theirs: Sequence[int], ours: Sequence[int]) -> UserError:
    return UserError(f"{folder}: the weight for {name} is {list(theirs)}, but config.json requires {list(ours)}")


def _with_word_embedding(tensors: dict[str, torch.Tensor], config: Any, base: str) -> dict[str, torch.Tensor]:
    """Return a folder's tensors with the word embedding, if it is tied and stored only as the output matrix."""
    if config.model_type == OWN_MODEL_TYPE or not config.tie_word_embeddings:
        return tensors
    from transformers import AutoModelForMaskedLM

    try:
        with torch.device("meta"):
            model = AutoModelForMaskedLM.from_config(config)
    except ValueError:  # the family has no masked LM
        return tensors
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    pair = (model.get_input_embeddings(), model.get_output_embeddings())
    word, output = (names.get(id(module), "") for module in pair)
    if output not in tensors or {word, word.removeprefix(base)} & tensors.keys():
        return tensors
    return {**tensors, word: tensors[output]} if tensors[output].shape == pair[0].weight.shape else tensors


COUNT_FROM_PADDING = (
    *("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "mpnet", "esm", "luke", "layoutlmv3"),
    *("data2vec-text", "ibert", "roberta-prelayernorm", "xmod", "lilt", "markuplm"),
)
"""Model types with positions numbered from the padding id + 1."""
ENCODERS_WITH_CAUSAL_LM = ("bert-generation",)
"""Encoders that transformers gives a causal-LM head and no masked-LM head, as it does decoders."""
PADDING_SENSITIVE = ("convbert", "fnet", "funnel", "mobilebert", "nystromformer", "yoso")
"""Model types whose layers in transformers do not leave out padding: convolutions, Fourier transforms, pooling, and
trigrams of pieces."""
MOST_LAYERS = 1000
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
"""Size attributes of most encoders' configurations; the first two are required."""


def foreign_inputs(config: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch as keyword arguments for a model of transformers: segments only if its `config` has them."""
    segments = {"token_type_ids": batch.segment_ids} if num_segments(config) > 1 else {}
    return {"input_ids": batch.input_ids, "attention_mask": (batch.document_ids > 0).long(), **segments}


def num_segments(config: Any) -> int:
    """Return the number of segments that a model distinguishes, ours or one of transformers; 0 without any."""
    return int(getattr(config, "num_segments", getattr(config, "type_vocab_size", 0)))


def model_builder(model_type: str, head: str) -> Callable[[Any], Any]:
    """Return the function that builds a model with a head from its configuration, ours or that of transformers.

    `head` is the ending of its class, such as ForMaskedLM; empty for the encoder alone.
    """
    if model_type == OWN_MODEL_TYPE:
        from megatron_ddrp.conversion import modeling_ddrp

        return getattr(modeling_ddrp, f"Ddrp{head or 'Model'}")
    import transformers

    return getattr(transformers, f"AutoModel{head}").from_config


class HuggingFaceEncoder(nn.Module):
    """Encoder around a BERT-class model of transformers."""

    def __init__(self, model: Any):
        super().__init__()
        base = model.base_model
        if _pooler_weights(model):  # every run creates its own pooler
            has_switch = "add_pooling_layer" in inspect.signature(type(base)).parameters
            base.pooler = None if has_switch else nn.Identity()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states `[batch, seq, hidden]`."""
        return self.model(**foreign_inputs(self.model.config, batch)).last_hidden_state


class FamilyModel(nn.Module):
    """Model of transformers with the head of its family."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.encoder_prefix = f"model.{model.base_model_prefix}."

    @classmethod
    def on_top_of(cls, folder: Path, encoder: nn.Module, form: HeadForm, labels: Labels) -> FamilyModel:
        """Return a model with the weights of the encoder of `folder` and a new head, from torch's generator.

        Raises:
            UserError: the family has no such head, or the folder's settings of heads are impossible.
        """
        assert isinstance(encoder, HuggingFaceEncoder)
        config = copy.deepcopy(encoder.model.config)
        if not labels.names:
            config.num_labels = 2  # logits of an answer's first and last piece
        else:
            config.id2label = dict(enumerate(labels.names))
            config.label2id = {name: number for number, name in enumerate(labels.names)}
        config.problem_type = labels.problem_type
        with transformers_reading(folder):
            model = _model_with_head(config, form)
        base = getattr(model, model.base_model_prefix)
        missing, unexpected = base.load_state_dict(encoder.model.state_dict(), strict=False)
        if unexpected or [name for name in missing if "pooler" not in name]:
            raise UserError(
                f"{type(model).__name__} does not contain the encoder {type(encoder.model).__name__}: use another one"
            )
        return cls(model)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the head's outputs, float32: `[batch, labels]`, or `[batch, seq, labels]` for heads on pieces."""
        return head_outputs(self.model(**foreign_inputs(self.model.config, batch)))


def head_outputs(output: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs of a head in float32, those of an answer's first and last piece as one `[batch, seq, 2]`."""
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], dim=-1).float()
    return output["logits"].float()


def _model_with_head(config: Any, form: HeadForm) -> Any:
    try:
        return model_builder(config.model_type, f"For{form.name}")(config)
    except ValueError as error:
        if config.model_type == OWN_MODEL_TYPE or not str(error).startswith("Unrecognized configuration class"):
            raise
        raise UserError(f"transformers has no AutoModelFor{form.name} for {config.model_type} models") from None


@dataclass(frozen=True)
class Folder:
    """A loaded Hugging Face folder."""

    config: Any
    model: Any
    build: Callable[[Any], nn.Module]
    """Function that builds a model with random weights from `config`."""
    weights: Filled
    """Account of the folder's weights, a pooler's among the unused; empty for random weights."""
    max_length: int
    """Longest sequence that the model has positions for, in tokens."""


def load_folder(folder: Path, values: dict[str, Any], masked_lm: bool, random_init: bool) -> Folder:
    """Load the model of a folder in fp32 on the CPU, with `masked_lm` under its masked-LM head.

    `values` are the content of config.json. With `random_init` the folder's weights are not read.

    Raises:
        UserError: one line, if the folder cannot be loaded, or if its weights do not fit its config.json.
    """
    need_packages(f"--load {folder} is a Hugging Face folder, which", "transformers")
    if values["model_type"] == OWN_MODEL_TYPE:
        FAMILIES[OWN_MODEL_TYPE].model_config(folder / "config.json", values)
    with transformers_reading(folder):
        config = _read_config(folder, values["model_type"])
        build = model_builder(values["model_type"], "ForMaskedLM" if masked_lm else "")
        if values["model_type"] != OWN_MODEL_TYPE:
            _refuse_other_models(folder, config)
        model, weights = (build(config), Filled()) if random_init else fill(folder, config, build)
        pooler = set() if random_init else _pooler_weights(model)  # every run creates its own
        weights = Filled(weights.missing - pooler, weights.unused | (pooler - weights.missing))
        return Folder(config, model.float(), build, weights, _longest(config))


@contextmanager
def transformers_reading(folder: Path) -> Iterator[None]:
    """Let transformers load a folder in the block, in silence; any error, also a lack of memory, is one line."""
    advice = f"--load {folder} describes a larger model than this machine can hold: check the sizes in its config.json"
    refused = reading(f"--load {folder}", "transformers cannot load it: {error}")
    with refused, allocations_as_user_errors(advice), quiet_transformers():
        yield


def _refuse_other_models(folder: Path, config: Any) -> None:
    """Raise an error for a decoder, and for impossible sizes before transformers builds a model."""
    if config.model_type == "xlnet":
        raise UserError(f"--load {folder}: xlnet has <cls> at the end of a row, here it is at the begin; use a BERT")
    if _is_decoder(config):
        raise ValueError(f"{config.model_type} is no encoder; use a BERT, RoBERTa, ELECTRA, DeBERTa, …")
    sizes = {key: getattr(config, key, None) for key in SIZES}
    for key, size in sizes.items():
        if size is not None or key in SIZES[:2]:
            setting(folder / "config.json", sizes, key, whole_number())
    layers = {"num_hidden_layers": getattr(config, "num_hidden_layers", 1)}
    setting(folder / "config.json", layers, "num_hidden_layers", whole_number(most=MOST_LAYERS))


def _is_decoder(config: Any) -> bool:
    """Return whether a model of transformers has a decoder, or its pieces see only the pieces before them."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if config.is_encoder_decoder or getattr(config, "is_decoder", False) or getattr(config, "causal", False):
        return True
    encoders = (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *ENCODERS_WITH_CAUSAL_LM)
    sees_all = getattr(config, "use_bidirectional_attention", None) in (True, "all")  # Gemma's setting
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and config.model_type not in encoders and not sees_all


def load_with_head(folder: Path, model_type: str, form: HeadForm) -> tuple[Any, Filled, int]:
    """Return the model of a folder with a head of this form, in fp32 on the CPU.

    After it come an account of its weights, and the longest sequence in tokens that it has positions for.

    Raises:
        UserError: as in `load_folder`.
    """
    with transformers_reading(folder):
        config = _read_config(folder, model_type)
        return *fill(folder, config, lambda known: _model_with_head(known, form), finite=False), _longest(config)


def _read_config(folder: Path, model_type: str) -> Any:
    """Return the configuration of a folder as transformers reads it, for a model in fp32."""
    with transformers_reading(folder):
        if model_type == OWN_MODEL_TYPE:
            from megatron_ddrp.conversion.modeling_ddrp import DdrpConfig

            config: Any = DdrpConfig.from_pretrained(folder)
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            released = getattr(FAMILIES.get(config.model_type), "released", {})
            values = read_object(folder / "config.json") if released else {}
            if not released.keys().isdisjoint(values):  # names of sizes that transformers does not read
                config = type(config)(**FAMILIES[config.model_type].complete(folder / "config.json", values))
    config.dtype = torch.float32  # otherwise models of a half-precision folder would be in half precision
    return config


def _longest(config: Any) -> int:
    """Return the longest sequence in tokens that a model has positions for."""
    counts_from_padding = config.model_type in COUNT_FROM_PADDING
    if counts_from_padding and config.pad_token_id is None:
        raise ValueError("pad_token_id is null in its config.json, and positions are counted from it; write the id")
    unread = config.pad_token_id + 1 if counts_from_padding else 0
    return int(getattr(config, "max_position_embeddings", 512)) - unread


def longest_sequence(folder: Path) -> int | None:
    """Return the longest sequence in tokens of a folder's model, by its configuration alone.

    None if transformers cannot read the configuration; loading the model then tells the reason.
    """
    try:
        return _longest(_read_config(folder, ""))
    except Exception:  # a damaged folder may make transformers raise anything
        return None


def _pooler_weights(model: Any) -> set[str]:
    """Return the names of the weights of the encoder's pooler; none for an encoder without one."""
    encoder = model.base_model
    pooler, prefix = getattr(encoder, "pooler", None), "" if encoder is model else f"{model.base_model_prefix}."
    return set() if pooler is None else {f"{prefix}pooler.{name}" for name, _ in pooler.named_parameters()}


def load_tokenizer(folder: Path, segments: int = 0) -> Tokenizer:
    """Load a folder's tokenizer, with rows for a model of so many `segments` if its files describe none.

    Without any vocabulary the error names the missing file.
    """
    tokenizer = find_tokenizer(folder) or build_tokenizer("HuggingFace", tokenizer_model=folder)
    if tokenizer.own_rows is None:
        tokenizer.settle_rows(segments)
    return tokenizer


class LayerStates(NamedTuple):
    """States of one layer over a batch."""

    hidden: Tensor
    """`[batch, seq, hidden]`."""
    head_cosine: Tensor | None
    """Mean pairwise cosine of the heads' attention logits, summed over the sentences (scalar). None for the embeddings,
    for a model with one head, for a model that transformers runs, and without `with_heads`."""


@torch.no_grad()
def layer_states(model: Any, batch: Batch, with_heads: bool = True) -> Iterator[LayerStates]:
    """Yield the states of layers 0 to L. `model` is an `Encoder` or an encoder of transformers.

    Layer 0 is the embeddings, layer L the last hidden states (after the final LayerNorm of a pre-LN model). A layer
    between gives the states that the next layer reads. Without `with_heads` the heads are not compared, which saves
    their logits. Raises `UserError` for an encoder whose layers have fewer states than tokens.
    """
    own = isinstance(model, Encoder)
    yield from _own_states(model, batch, with_heads) if own else _foreign_states(model, batch)


def _own_states(model: Encoder, batch: Batch, with_heads: bool) -> Iterator[LayerStates]:
    num_heads, num_layers = model.config.num_attention_heads, model.config.num_layers
    compared = num_heads if with_heads and num_heads > 1 else 0
    heads = torch.arange(compared, device=batch.document_ids.device).expand(num_layers, -1)  # [layers, heads]
    nothing = Draws.none(len(batch.input_ids), num_layers, batch.document_ids.device)
    state = model.embeddings(Inputs.of(batch, nothing._replace(heads=heads)))
    yield LayerStates(state.hidden, None)
    for number, layer in enumerate(model.layers, 1):
        state = layer(state)
        hidden = state.hidden if number < num_layers else model.head.last_hidden(state.hidden)
        yield LayerStates(hidden, state.head_cosine if compared else None)
        state = state._replace(head_cosine=torch.zeros_like(state.head_cosine))


def _foreign_states(model: Any, batch: Batch) -> Iterator[LayerStates]:
    output = model(**foreign_inputs(model.config, batch), output_hidden_states=True)
    states = (*output.hidden_states[:-1], output.last_hidden_state)
    if any(hidden.shape[:2] != batch.input_ids.shape for hidden in states):
        kind = model.config.model_type
        raise UserError(f"layers of a {kind} shorten their rows: use an encoder with one state per token and layer")
    for hidden in states:
        yield LayerStates(hidden, None)
