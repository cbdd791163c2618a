"""`load_encoder` leaves its process as it was, and threads that share an encoder do not disturb each other."""

import threading
import warnings

import numpy as np
import pytest
import torch

from megatron_ddrp import load_encoder
from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import PLUGINS, TABLES, plugins_forgotten_after, plugins_within
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders import encoder as loading
from megatron_ddrp.encoders.masked_lm import load_masked_lm
from tests.unit.conversion.conftest import write_checkpoint
from tests.unit.encoders.test_text_encoder import SPECIAL, WORDS, in_folder

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

CODE = """
import torch
from megatron_ddrp.model.positions import PositionEncoding, PositionTerms

class Tilt(PositionEncoding):
    any_length = True

    def forward(self, position_ids):
        return ()

    @staticmethod
    def terms(config, tensors):
        bias = (-1.5 * torch.arange(-9.0, 10).abs()).expand(config.num_attention_heads, -1)
        return PositionTerms(config.head_dim**-0.5, lowest=-9, highest=9, offset_bias=bias)

ENCODINGS = {"tilt": Tilt}
"""


def tables():
    return [dict(PLUGINS), *map(dict, TABLES.values())]


@pytest.fixture
def plugin(tmp_path):
    """A plug-in with an encoding."""
    path = tmp_path / "tilt.py"
    path.write_text(CODE)
    return path


@pytest.fixture(params=["run", "export"])
def folder(request, tmp_path, plugin):
    """A model with the plug-in's encoding."""
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    with plugins_forgotten_after():
        load_plugin(plugin)
        tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab)
        run = write_checkpoint(tmp_path / "run", tokenizer, "mlm", position_encoding="tilt")
        if request.param == "run":
            return run
        export_checkpoint(run, tmp_path / "export")
        return tmp_path / "export"


def test_plug_ins_are_forgotten_and_their_new_code_is_read(folder, plugin):
    before = tables()
    first = load_encoder(folder, device="cpu", plugins=[plugin])
    assert tables() == before
    vector, masked = first.pool("the red cat"), first.fill_mask("the [MASK] cat")
    plugin.write_text(CODE.replace("-1.5", "1.5"))
    changed = load_encoder(folder, device="cpu", plugins=iter([str(plugin)]))
    assert np.abs(changed.pool("the red cat") - vector).max() > 0.1
    assert abs(changed.fill_mask("the [MASK] cat")[0][0].probability - masked[0][0].probability) > 1e-3
    np.testing.assert_array_equal(first.pool("the red cat"), vector)
    assert tables() == before
    plugin.write_text("ENCODINGS = {'tilt': 3}")
    with pytest.raises(loading.UserError, match="expected a class derived from PositionEncoding"):
        load_encoder(folder, plugins=[plugin])
    assert tables() == before


def test_the_code_of_an_encoding_is_part_of_the_fingerprint(folder, plugin):
    def fingerprints():
        with plugins_within([plugin]):
            return [
                load(folder, is_random).fingerprint
                for load in (loading.load_encoder, load_masked_lm)
                for is_random in (False, True)
            ]

    first = fingerprints()
    assert fingerprints() == first
    plugin.write_text(CODE.replace("-1.5", "1.5"))
    assert not set(fingerprints()) & set(first)


def test_a_thread_that_fills_a_mask_leaves_the_states_of_another_alone(tmp_path):
    encoder = load_encoder(in_folder(tmp_path, "BertForMaskedLM"), device="cpu")
    filled, expected, found = encoder.fill_mask("the [MASK] [MASK]"), encoder.pool(["the cat", "red"]), []

    def pool_elsewhere(*_):
        if not threads:
            threads.append(threading.Thread(target=lambda: found.append(encoder.pool(["the cat", "red"]))))
            threads[0].start()
            threads[0].join()

    threads: list[threading.Thread] = []
    hook = encoder.model.register_forward_pre_hook(pool_elsewhere)  # in the middle of `fill_mask`
    assert encoder.fill_mask("the [MASK] [MASK]") == filled
    hook.remove()
    np.testing.assert_array_equal(found[0], expected)
    encoder.model(torch.tensor([[2, 6, 3]])).last_hidden_state.sum().backward()  # the user's model still trains


def test_threads_take_turns_with_their_plug_ins(tmp_path):
    """A thread that ends its block leaves another's names, and a block that began before both leaves none."""
    found, first_is_in, second_began = [], threading.Event(), threading.Event()

    def load(name):
        path = tmp_path / f"{name}.py"
        path.write_text(CODE.replace('"tilt"', f'"{name}"'))
        with plugins_within([path]):
            first_is_in.set()
            assert second_began.wait(60)
            if name == "one":
                threads[1].join(0.05)  # which waits for this block
            found.append([other for other in ("one", "two") if other in TABLES["ENCODINGS"]])

    before = tables()
    threads = [threading.Thread(target=load, args=(name,)) for name in ("one", "two")]
    with plugins_forgotten_after():
        threads[0].start()
        assert first_is_in.wait(60)
        threads[1].start()
        second_began.set()
    for thread in threads:
        thread.join()
    assert found == [["one"], ["two"]] and tables() == before


@pytest.mark.parametrize("hub_has_bars", [True, False])
@pytest.mark.parametrize("has_bars", [True, False])
def test_transformers_speaks_as_before_a_load(has_bars, hub_has_bars, tmp_path):
    logging, hub = transformers.logging, huggingface_hub.utils
    folder = in_folder(tmp_path, "BertForMaskedLM")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    logging.set_verbosity_info()
    (logging.enable_progress_bar if has_bars else logging.disable_progress_bar)()
    (hub.enable_progress_bars if hub_has_bars else hub.disable_progress_bars)()
    try:
        load_encoder(folder, device="cpu").fill_mask("the [MASK]")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, has_bars)
        assert hub.are_progress_bars_disabled() is not hub_has_bars
    finally:
        logging.set_verbosity(before[0])
        (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()
        (hub.disable_progress_bars if before[2] else hub.enable_progress_bars)()


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "AlbertModel", "MPNetModel"])
def test_an_encoder_without_a_pooler_gives_no_pooled_vector(name, tmp_path):
    encoder = load_encoder(in_folder(tmp_path, name), device="cpu")
    with torch.inference_mode():
        output = encoder.model(torch.tensor([[2, 6, 7, 3]]))
    assert output.pooler_output is None and output.last_hidden_state.shape == (1, 4, 16)


def test_texts_without_a_known_piece_are_counted_in_a_line(tmp_path):
    encoder = load_encoder(in_folder(tmp_path, "BertModel"), device="cpu")
    told = r"^2 of 4 texts had no piece but \[UNK\]: the vocabulary knows nothing in them; use an encoder of their"
    for call in (encoder.pool, encoder.encode):
        with pytest.warns(UserWarning, match=told) as warned:
            call(["red", "Доброе утро", "", ("да", "нет")])
        assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.pool(["red да", "", ("red", "нет")])
