"""Encoders for Python users: texts in, hidden states, sentence vectors and filled masks out, as numpy arrays.

    from megatron_ddrp import load_encoder

    encoder = load_encoder("runs/ddrp")
    encoder.encode("A sentence.")                        # [pieces, hidden]
    encoder.pool(["One text.", "Another one."])          # [texts, hidden]
    encoder.fill_mask("Paris is the [MASK] of France.")  # candidates for each mask

A text is a string, or a tuple of two strings for a pair; several texts come as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ddrp.config.registry import plugins_within
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders import encoder as loading
from megatron_ddrp.encoders.huggingface import HuggingFaceEncoder, layer_states
from megatron_ddrp.encoders.masked_lm import (
    POOLINGS,
    Text,
    TrainedLogits,
    check_count,
    layer_numbers,
    load_masked_lm,
    pool_rows,
    rows_of,
)
from megatron_ddrp.encoders.rows import Encoded, dev_order, pad_batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.bert import Bert, count_parameters
from megatron_ddrp.model.fused import named_device

BAR_AFTER = 2
"""Seconds after which a progress bar appears."""


class Candidate(NamedTuple):
    """A piece that may stand at a masked place."""

    piece: str
    probability: float
    id: int


def load_encoder(
    path: str | PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    plugins: Iterable[str | PathLike[str]] = (),
) -> TextEncoder:
    """Load an encoder, ready for inference.

    Args:
        path: the `--save` folder of a run (a warning names damaged checkpoints), one DIR/iter_N in it, our export, or
            any Hugging Face folder of a BERT-class encoder. Nothing is downloaded, and no code in the folder is run.
        device: such as "cpu" or "cuda:0"; by default the GPU if there is one, else the CPU.
        dtype: float32, or "bfloat16" or "float16", which halve the memory. Results are float32 arrays in any case.
        plugins: files that the run was given as `--plugin`. Their code is run, for this encoder alone.

    Raises:
        UserError: one line that names the folder's fault.
    """
    chosen = named_device(device, f"device={device!r:.60}")
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.float32
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
        raise UserError(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    files = [Path(file).resolve() for file in plugins]
    try:
        with plugins_within(files):
            encoder = loading.load_encoder(Path(path).expanduser())
    except UserError as error:
        raise UserError(str(error).removeprefix("--load "), error.exit_code) from None
    loading.warn_of(encoder)
    return TextEncoder(encoder, chosen, kind, files)


class TextEncoder:
    """An encoder with its tokenizer on one device. Make one with `load_encoder`."""

    def __init__(
        self, encoder: loading.LoadedEncoder, device: torch.device, dtype: torch.dtype, plugins: Sequence[Path] = ()
    ):
        """Move `encoder` to `device` in precision `dtype`, in place. `plugins` were loaded for it alone."""
        self._encoder, self.device, self.dtype, self._plugins = encoder, device, dtype, plugins
        self._module = self._ready(encoder)

    def _ready(self, encoder: loading.LoadedEncoder) -> Any:
        for parameter in encoder.module.parameters():  # not its buffers: bf16 would shift rotary frequencies
            parameter.data = parameter.data.to(self.dtype)
        return encoder.module.to(self.device).eval()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._encoder.tokenizer

    @property
    def model(self) -> Any:
        """The torch module: one of `megatron_ddrp.model`, or of transformers."""
        return self._module.model

    @property
    def hidden_size(self) -> int:
        """Numbers per hidden state."""
        return self._encoder.hidden_size

    @property
    def max_length(self) -> int:
        """Longest row in pieces, [CLS] and [SEP] included."""
        return self._encoder.max_length

    @property
    def num_layers(self) -> int:
        """Number of layers without the embeddings, which count as layer 0."""
        config = self.model.config
        return getattr(config, "num_layers", None) or config.num_hidden_layers

    @property
    def num_parameters(self) -> int:
        """Number of parameters of `model`, without the padding of the vocabulary."""
        return count_parameters(self.model)[0]

    @property
    def mask_token(self) -> str:
        """The piece that stands for a missing one in `fill_mask`: "[MASK]", "<mask>"."""
        return self.tokenizer.pieces[self.tokenizer.mask_id]

    def __repr__(self) -> str:
        config = self.model.config
        kind = getattr(config, "position_encoding", None)
        kind = f"{kind} positions" if kind else config.model_type
        size = f"{self.num_layers} layers x {self.hidden_size}, {self.num_parameters:,} parameters"
        rest = f"{self.tokenizer.vocab_size:,} pieces, rows of up to {self.max_length}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<TextEncoder {self._encoder.folder}: {kind}, {size}, {rest}, {dtype} on {self.device}>"

    @overload
    def tokenize(self, texts: Text) -> list[str]: ...  # type: ignore[overload-overlap]  # a string is a sequence too
    @overload
    def tokenize(self, texts: Sequence[Text]) -> list[list[str]]: ...
    def tokenize(self, texts: Text | Sequence[Text]) -> list[str] | list[list[str]]:
        """Return the pieces of each text with [CLS] and [SEP]: the rows of `encode`, piece for piece."""
        rows, is_one = rows_of(self._encoder, texts, None)
        names, ends = [self.tokenizer.pieces[i] for i in rows.pieces.tolist()], rows.ends.tolist()
        found = [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return found[0] if is_one else found

    @overload
    def encode(  # type: ignore[overload-overlap]
        self,
        texts: Text,
        layers: int | Sequence[int] | str | None = ...,
        batch_size: int = ...,
        max_length: int | None = ...,
        progress: bool = ...,
    ) -> np.ndarray: ...
    @overload
    def encode(
        self,
        texts: Sequence[Text],
        layers: int | Sequence[int] | str | None = ...,
        batch_size: int = ...,
        max_length: int | None = ...,
        progress: bool = ...,
    ) -> list[np.ndarray]: ...
    def encode(
        self,
        texts: Text | Sequence[Text],
        layers: int | Sequence[int] | str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        progress: bool = True,
    ) -> np.ndarray | list[np.ndarray]:
        """Return the hidden states of one text, or a list with those of each text, in float32.

        Args:
            texts: a string, a tuple of two strings (a pair), or a list of these.
            layers: None for the last layer; a number from 0 (embeddings) to `num_layers`, or from the end as in lists:
                arrays are `[pieces, hidden]`. A list of numbers, or "all": `[layers, pieces, hidden]`.
            batch_size: rows per forward pass; rows of similar length share one.
            max_length: rows are cut to so many pieces (default: `max_length` of the encoder). A warning says how many
                were cut.
            progress: show a bar when it takes more than two seconds.

        The pieces, [CLS] and [SEP] included, are those of `tokenize`. Padding is left out.
        """
        rows, is_one = rows_of(self._encoder, texts, max_length)
        numbers, keep_axis = layer_numbers(layers, self.num_layers)
        check_count("batch_size", batch_size)
        found: list[Any] = [None] * len(rows)
        for which, states in self._states(rows, numbers, batch_size, progress and not is_one):
            arrays = states.cpu().numpy()  # [layers, rows, pieces, hidden]
            for place, (row, length) in enumerate(zip(which, rows.lengths[which], strict=True)):
                own = arrays[:, place, :length] if keep_axis else arrays[0, place, :length]
                found[row] = own.copy()  # a view would keep the padding in memory
        return found[0] if is_one else found

    def pool(
        self,
        texts: Text | Sequence[Text],
        how: str = "mean",
        layer: int | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        progress: bool = True,
    ) -> np.ndarray:
        """Return one vector per text, `[texts, hidden]` in float32; `[hidden]` for a single text.

        `how`: "mean" over all pieces ([CLS] and [SEP] included, as sentence-transformers does), "cls" for the state of
        [CLS], or "max" per dimension. `layer` and the other arguments are as in `encode`.
        """
        if how not in POOLINGS:
            raise UserError(f"how={how!r}: expected one of {', '.join(POOLINGS)}")
        rows, is_one = rows_of(self._encoder, texts, max_length)
        numbers, _ = layer_numbers(layer, self.num_layers, one=True)
        check_count("batch_size", batch_size)
        found = np.empty((len(rows), self.hidden_size), dtype=np.float32)
        for which, states in self._states(rows, numbers, batch_size, progress and not is_one):
            lengths = torch.from_numpy(rows.lengths[which]).to(states.device)
            found[which] = pool_rows(states[0], lengths, how).cpu().numpy()
        return found[0] if is_one else found

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Candidate]]:
        """Return the `top_k` most probable pieces for each mask of a text, the best first: `[masks][top_k]`.

        A missing piece is written as `mask_token`. The probabilities are over the whole vocabulary, each mask by itself
        while the others stay masked.
        """
        if not isinstance(text, str):
            raise UserError(f"text={text!r:.60}: expected one string; call fill_mask once per text")
        check_count("top_k", top_k)
        tokenizer = self.tokenizer
        ids, _, _ = tokenizer.rows.row([tokenizer.encode_with_masks(text)])
        places = [place for place, i in enumerate(ids) if i == tokenizer.mask_id]
        if not places:
            raise UserError(f"no {self.mask_token} in {text[:60]!r}: write {self.mask_token} where a piece is missing")
        if len(ids) > self.max_length:
            raise UserError(f"the text has {len(ids)} pieces, and the encoder knows {self.max_length}: shorten it")
        row = torch.tensor([ids] * len(places), device=self.device)  # one row per mask, all of them equal
        logits_of = self._piece_logits  # loaded here, since weights of inference mode would be useless elsewhere
        with torch.inference_mode():
            logits = logits_of(row, torch.tensor(places, device=self.device))  # [masks, vocab]
            shares = logits.float().softmax(-1)[:, : tokenizer.vocab_size]
            best = shares.topk(min(top_k, tokenizer.vocab_size))
        return [
            [Candidate(tokenizer.pieces[i], share, i) for share, i in zip(of_mask, which, strict=True)]
            for of_mask, which in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    @cached_property
    def _piece_logits(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Function from equal rows `[masks, length]` and a place in each to logits `[masks, vocab]`.

        A Hugging Face folder is read once more for its head, and both share the encoder's weights. Threads share them
        too, so that no hook may cut the states, as in `HuggingFaceLogits`.
        """
        if isinstance(self.model, Bert):
            return TrainedLogits(self.model)
        folder = self._encoder.folder
        try:
            with plugins_within(self._plugins):
                module = self._ready(load_masked_lm(folder))
        except loading.NoMaskedLM as error:
            raise UserError(f"{folder}: fill_mask needs a masked-LM head; {error.reason}") from None
        self._module = HuggingFaceEncoder(module.model.base_model)
        return lambda rows, places: module.model(rows[:1]).logits[0, places]

    def _states(
        self, rows: Encoded, layers: list[int] | None, batch_size: int, progress: bool
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield row numbers and their states `[layers, rows, seq, hidden]` in float32, the longest rows first."""
        with tqdm(total=len(rows), unit="text", leave=False, delay=BAR_AFTER, disable=not progress) as bar:
            for which in reversed(dev_order(rows, batch_size)):
                batch = pad_batch(rows, which).map(lambda field: torch.from_numpy(field).to(self.device))
                with torch.inference_mode():
                    if layers is None:
                        states = self._module(batch).unsqueeze(0)
                    else:
                        every = [layer.hidden for layer in layer_states(self.model, batch, with_heads=False)]
                        states = torch.stack([every[layer] for layer in layers])
                    yield which, states.float()
                bar.update(len(which))
