"""The model's shape and its positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_ddrp.config.reading import COUNT, POSITIVE, WAVELENGTH_BASE, Section, check_range, option, refuse
from megatron_ddrp.config.registry import ENCODING_WORDS, ENCODINGS

VOCABULARY_MULTIPLE = 128
"""Multiple to which every layout pads the vocabulary. Padding is never predicted, and exports omit it."""

STARTS = ("init_method_std", "attention_init", "direction_init")
"""Fields of `ModelConfig` that act only when weights are drawn: trained weights with others compute the same."""


@dataclass(frozen=True)
class ModelConfig(Section):
    """Model"""

    num_layers: int = option(12, "Transformer layers", within="[1, 10000]")
    hidden_size: int = option(768, "width of the hidden states", within=COUNT)
    num_attention_heads: int = option(12, "attention heads per layer; must divide the hidden size", within=COUNT)
    ffn_hidden_size: int | None = option(
        None,
        "width inside the feed-forward block (default: 4 x hidden size; for geglu and swiglu 8/3 x, rounded up to a "
        "multiple of 64, which needs as many weights)",
        within=COUNT,
    )
    ffn: str = option(
        "gelu",
        "feed-forward block: gelu between two linear maps, or geglu, which multiplies the GELU with a third linear map "
        "(arXiv:2002.05202); swiglu has SiLU in place of GELU, in the masked-LM head too",
        choices=("gelu", "geglu", "swiglu"),
    )
    norm: str = option(
        "layernorm",
        "layernorm, or rmsnorm, which subtracts no mean and has no bias (arXiv:1910.07467); a position encoding keeps "
        "its own norms",
        choices=("layernorm", "rmsnorm"),
    )
    bias: bool = option(
        True,
        "biases in linear maps and LayerNorms; with --no-bias only the output layer has one, as in ModernBERT, "
        "besides those of the position encoding",
    )
    norm_bias: bool | None = option(
        None, "biases in LayerNorms and in the dense map of the masked-LM head, as in NomicBERT (default: as --bias)"
    )
    key_bias: bool = option(
        None,
        "a bias in the linear map of the keys; it acts only through position terms and HCD (default: on, except for "
        "deberta, as in DeBERTa v1)",
    )
    embedding_size: int | None = option(
        None, "width of the embeddings, projected to the hidden size as in ELECTRA (default: hidden size)", within=COUNT
    )
    num_segments: int = option(
        2, "number of segment embeddings; with 1 all tokens share one, with 0 there are none", within="[0, 2]"
    )
    seq_length: int = option(
        512, "longest sequence in tokens, including [CLS] and [SEP]; at least 3", within="[3, 2147483648)"
    )
    hidden_dropout: float = option(0.1, "dropout on embeddings and on each block's output", within="[0, 1)")
    attention_dropout: float = option(0.1, "dropout on attention probabilities", within="[0, 1)")
    layernorm_position: str = option("post", "LayerNorm after each block (BERT) or before it", choices=("post", "pre"))
    first_norm: bool = option(
        True, "with --layernorm-position pre: a norm before the first attention too, after the norm of the embeddings"
    )
    embedding_norm: bool = option(True, "a norm of the embeddings; EuroBERT, which is pre-norm, has none")
    layernorm_epsilon: float = option(
        1e-12, "number added to the variance (or mean square) in every norm", within="(0, 1]"
    )
    init_method_std: float = option(0.02, "standard deviation of the normal initialisation", within=POSITIVE)
    attention_init: str = option(
        "normal",
        "start of attention: normal draws queries and keys like all else; with offsets each head also attends to one "
        "place beside its own, -1, 1, -2, 2, ..., which ends the plateau of absolute positions early "
        "(docs/lab/plateau.md); narrow heads find it worse, and under electra and rtd only the "
        "discriminator starts so",
        choices=("normal", "offsets"),
    )
    position_encoding: str = option("ddrp", f"position encoding ({ENCODING_WORDS})", choices=ENCODINGS)
    relative_distance: int = option(  # None is resolved below
        None,
        "distance from which on all relative distances share one embedding (r_s in the paper); for deberta-v2 the "
        "buckets per direction (default: 64; as released 128 for tupe-r and t5, 256 for deberta-v2)",
        within=COUNT,
    )
    relative_table: str = option(
        "shared", "one relative table for all layers, or one per layer", choices=("shared", "per-layer")
    )
    direction_init: str = option(
        "spread",
        "initialisation of ddrp's direction vectors D, by normal distributions: spread has mean 1 and deviation 0.5, "
        "ones mean 1 and deviation --init-method-std, free mean 0 and deviation 1, embedding mean 0 and deviation "
        "--init-method-std, as every embedding",
        choices=("spread", "ones", "free", "embedding"),
    )
    absolute_embedding: bool | None = option(
        None,
        "add BERT's absolute position embedding to the input, besides the encoding's own terms (default: only for "
        "--position-encoding absolute)",
    )
    deberta_emd: bool | None = option(
        None, "DeBERTa's enhanced mask decoder: add absolute positions just before the head (default: on for deberta)"
    )
    local_attention: int | None = option(
        None,
        "number of neighbours that most layers attend to, half of them on either side, as in ModernBERT (default: "
        "every layer attends to the whole document)",
        within="[2, 2147483648)",
    )
    global_every: int = option(
        3, "with --local-attention, layers 0, N, 2N, … attend to the whole document", within=COUNT
    )
    rope_theta: float = option(
        10_000.0, "base of the wavelengths of rope; other encodings ignore it", within=WAVELENGTH_BASE
    )
    local_rope_theta: float | None = option(
        None, "the same for the layers of --local-attention (default: --rope-theta)", within=WAVELENGTH_BASE
    )
    attention_backend: str = option(
        "auto",
        "auto chooses one and says which at the start; eager is the reference, blocked is for CPUs, sdpa is torch's "
        "fused attention, triton is for A100 and newer",
        choices=("auto", "eager", "blocked", "sdpa", "triton"),
    )
    compile: str = option(
        "auto",
        "join dropout, residual sums, LayerNorms and GELU of a layer into fewer kernels (torch.compile): auto does so "
        "on A100 and newer GPUs; on CPUs it gains nothing, and the first step takes a minute or more",
        choices=("auto", "on", "off"),
    )
    vocab_size: int = 30522
    """Number of pieces of the tokenizer; the model rounds it up to `padded_vocab_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("vocab_size", self.vocab_size, COUNT)
        if self.hidden_size % self.num_attention_heads:
            refuse(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}: choose a hidden size that is a multiple of the heads"
            )
        if not self.first_norm and self.layernorm_position == "post":
            refuse("--no-first-norm with --layernorm-position post, which has no norm before a block: leave it out")
        if self.norm_bias == self.bias:
            object.__setattr__(self, "norm_bias", None)  # the default: equal settings are stored alike
        if self.embedding_size == self.hidden_size:
            object.__setattr__(self, "embedding_size", None)  # the default: equal settings are stored alike
        if self.position_encoding in ENCODINGS or None in (self.relative_distance, self.key_bias):
            self._ask_encoding()  # a run with a plug-in has stored complete settings, so they load without the plug-in

    def _ask_encoding(self) -> None:
        """Take the encoding's defaults; refuse a distance, an embedding or sizes that the encoding does not support."""
        encoding, name = self.encoding, f"--position-encoding {self.position_encoding}"
        if self.relative_distance is None:
            object.__setattr__(self, "relative_distance", encoding.relative_distance)
        elif encoding.relative_distance is None:
            refuse(
                f"--relative-distance {self.relative_distance} with {name}, which has no relative embeddings: "
                "leave the distance out"
            )
        if self.key_bias is None:
            object.__setattr__(self, "key_bias", encoding.key_bias)
        if encoding.adds_absolute_embedding and not encoding.in_logits and self.absolute_embedding is False:
            refuse(f"--no-absolute-embedding with {name} leaves no positions: leave --no-absolute-embedding out")
        if self.absolute_embedding is encoding.adds_absolute_embedding:
            object.__setattr__(self, "absolute_embedding", None)  # the default: equal settings are stored alike
        if self.attention_init == "offsets":
            if not self.adds_absolute_embedding:
                refuse(f"--attention-init offsets with {name}: its input has no positions; give --absolute-embedding")
            if self.embedding_size is not None:
                refuse(
                    "--attention-init offsets with --embedding-size: the heads cannot read the positions; leave one out"
                )
        reason = encoding.refusal(self)
        if reason is not None:
            refuse(f"{name}: {reason}")

    @property
    def encoding(self) -> Any:
        """Class of the position encoding, a `PositionEncoding`. Raises `NotRegistered` for an unknown name."""
        return ENCODINGS.find(self.position_encoding)

    @property
    def adds_absolute_embedding(self) -> bool:
        """True if a learned absolute position embedding is added to the input."""
        if self.absolute_embedding is None:
            return bool(self.encoding.adds_absolute_embedding)
        return self.absolute_embedding

    @property
    def decodes_masks(self) -> bool:
        """True if a masked LM of this shape has the enhanced mask decoder."""
        if self.deberta_emd is None:
            return bool(self.encoding.decodes_absolute)
        return self.deberta_emd

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def biased_norms(self) -> bool:
        """True if LayerNorms have a bias."""
        return self.bias if self.norm_bias is None else self.norm_bias

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is None and self.ffn != "gelu":
            return math.ceil(self.hidden_size / 24) * 64
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def ffn_maps(self) -> int:
        """Number of linear maps of the feed-forward block, all between hidden size and `ffn_size`."""
        return 2 if self.ffn == "gelu" else 3

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings and of the output matrix tied to them."""
        return self.embedding_size or self.hidden_size

    def window(self, layer: int) -> int | None:
        """Return how many tokens to the left and to the right a layer attends to; None for the whole document."""
        if self.local_attention is None or layer % self.global_every == 0:
            return None
        return self.local_attention // 2

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
