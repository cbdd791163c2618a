"""`load_encoder` for Python users: equal to transformers with the export, and to its fill-mask pipeline."""

import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ddrp import load_encoder
from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import PLUGINS, TABLES, plugins_forgotten_after, plugins_within
from megatron_ddrp.conversion.families.contract import exported_class
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.encoders import encoder as loading
from megatron_ddrp.encoders.masked_lm import load_masked_lm
from tests.refusals import refused
from tests.unit.conversion.conftest import SEQ_LENGTH, SIZES, tokenizer_in, write_checkpoint, write_folder
from tests.unit.conversion.tokenizers_of_families import FAIRSEQ, byte_level, settings

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

TEXTS = ["the cat sings.", "red", "blue dogs run, birds sing.", ("the bird", "green cats run")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return write_checkpoint(folder / "run", tokenizer_in(folder))


@pytest.fixture
def in_folder(tmp_path, run):
    """Class of transformers → a folder with a model of random weights and the words' vocabulary."""

    def write(class_name):
        write_folder(tmp_path / class_name, run.parent / "vocab.txt", class_name)
        return tmp_path / class_name

    return write


@pytest.fixture(scope="module")
def exported(run):
    """Its export, the export's masked LM and tokenizer as transformers loads them."""
    folder = run.parent / "hf"
    export_checkpoint(run, folder)
    model = exported_class(folder, "DdrpForMaskedLM").from_pretrained(folder).eval()
    return folder, model, transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoder(run):
    return load_encoder(run, device="cpu")


@torch.no_grad()
def states_of(model, tokenizer, text):
    """Hidden states of all layers, `[layers, pieces, hidden]`, by transformers alone."""
    given = tokenizer(*(text if isinstance(text, tuple) else (text,)), return_tensors="pt")
    return torch.stack(model(**given, output_hidden_states=True).hidden_states)[:, 0].numpy()


def test_states_are_those_of_the_export_in_every_layer(run, exported, encoder):
    folder, model, tokenizer = exported
    expected = [states_of(model, tokenizer, text) for text in TEXTS]
    for path in (run, run / "iter_0000003", folder):
        loaded = load_encoder(str(path), device="cpu")
        for states, every, one, truth in zip(
            loaded.encode(TEXTS, batch_size=2),
            loaded.encode(TEXTS, layers="all", batch_size=3),
            loaded.encode(TEXTS, layers=1),
            expected,
            strict=True,
        ):
            assert states.shape == truth.shape[1:] and states.dtype == np.float32
            np.testing.assert_allclose(every, truth, atol=2e-5)
            np.testing.assert_allclose(states, truth[-1], atol=2e-5)
            np.testing.assert_allclose(one, truth[1], atol=2e-5)
    np.testing.assert_allclose(encoder.encode(TEXTS[3], layers=[-1, 0]), expected[3][[-1, 0]], atol=2e-5)
    assert not np.allclose(expected[0][-1], expected[0][1], atol=0.1)


def test_pieces_stand_beside_their_states_which_are_pooled_as_by_loops(encoder):
    assert encoder.tokenize("the Cats sing") == ["[CLS]", "the", "cat", "##s", "sing", "[SEP]"]
    assert encoder.tokenize(("the", "cat")) == ["[CLS]", "the", "[SEP]", "cat", "[SEP]"]
    states = encoder.encode(TEXTS)
    assert [*map(len, encoder.tokenize(TEXTS))] == [*map(len, states)]
    by_loops = {
        "mean": [[sum(column) / len(column) for column in rows.T] for rows in states],
        "cls": [rows[0] for rows in states],
        "max": [[max(column) for column in rows.T] for rows in states],
    }
    for how, expected in by_loops.items():
        found = encoder.pool(TEXTS, how, batch_size=3)
        assert found.shape == (len(TEXTS), encoder.hidden_size) and found.dtype == np.float32
        np.testing.assert_allclose(found, np.array(expected), atol=1e-5)
    np.testing.assert_allclose(encoder.pool("red"), by_loops["mean"][1], atol=1e-5)
    first = [rows.mean(0) for rows in encoder.encode(TEXTS, layers=0)]
    np.testing.assert_allclose(encoder.pool(TEXTS, layer=0), first, atol=1e-5)
    assert encoder.pool([]).shape == (0, encoder.hidden_size) and encoder.encode([]) == []


def assert_as_the_pipeline(encoder, model, tokenizer, text, top_k=4):
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")
    expected = pipeline(text, top_k=top_k)
    expected = expected if isinstance(expected[0], list) else [expected]
    found = encoder.fill_mask(text, top_k)
    assert [[each.id for each in of_mask] for of_mask in found] == [[e["token"] for e in row] for row in expected]
    scores = [[e["score"] for e in row] for row in expected]
    np.testing.assert_allclose([[each.probability for each in of_mask] for of_mask in found], scores, rtol=1e-4)
    assert all(each.piece == encoder.tokenizer.pieces[each.id] for of_mask in found for each in of_mask)


def test_masks_are_filled_as_by_the_pipeline_with_the_export_and_a_bert(in_folder, exported, run):
    for encoder in (load_encoder(path, device="cpu") for path in (run, exported[0])):
        for text in ("The [MASK] sings.", "[MASK]", "a[MASK]s, the red [MASK] [MASK]"):
            assert_as_the_pipeline(encoder, *exported[1:], text)
    folder = in_folder("BertForMaskedLM")
    encoder = load_encoder(folder, device="cpu")
    before = encoder.encode("the cat")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    assert_as_the_pipeline(encoder, model, tokenizer, "the [MASK] sings, [MASK].")
    np.testing.assert_array_equal(encoder.encode("the cat"), before)
    np.testing.assert_allclose(before, states_of(model, tokenizer, "the cat")[-1], atol=1e-5)


def test_masks_are_filled_as_by_the_pipeline_with_a_roberta(tmp_path):
    """Whose mask takes the space before it along, in a vocabulary where spaces belong to the next piece."""
    byte_level(tmp_path, FAIRSEQ, template=True)
    settings(tmp_path, FAIRSEQ)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"mask_token": transformers.AddedToken("<mask>", lstrip=True, special=True)})
    tokenizer.save_pretrained(tmp_path)
    sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 40, "pad_token_id": 1}
    transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes)).save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu")
    assert encoder.mask_token == "<mask>"
    model = transformers.RobertaForMaskedLM.from_pretrained(tmp_path)
    assert_as_the_pipeline(encoder, model, tokenizer, "the <mask> cats are <mask>, singing")


def test_long_texts_are_cut_with_a_warning_and_others_without(encoder):
    words = r"1 of 2 texts had more than 24 pieces and were cut \(the longest has 42\)"
    with pytest.warns(UserWarning, match=words) as told:
        states = encoder.encode(["red", "cat " * 40])
    assert [len(rows) for rows in states] == [3, SEQ_LENGTH] and told[0].filename == __file__
    with pytest.warns(UserWarning, match="1 of 1 texts had more than 6 pieces"):
        assert encoder.encode(("the red cat", "dog"), max_length=6).shape[0] == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.pool(["cat " * 22])
    assert len(encoder.fill_mask("[MASK] " * 22)) == 22  # 24 pieces, the longest row


def test_a_wrong_call_is_one_line(encoder):
    for words, call, *given, options in (
        (r"no \[MASK\] in 'the cat': write \[MASK\] where a piece is missing", encoder.fill_mask, "the cat", {}),
        ("the text has 25 pieces, and the encoder knows 24", encoder.fill_mask, "[MASK] " * 23, {}),
        (r"text=\['the \[MASK\]'\]: expected one string; call fill_mask once", encoder.fill_mask, ["the [MASK]"], {}),
        ("top_k=0: expected a whole number of at least 1", encoder.fill_mask, "the [MASK]", {"top_k": 0}),
        (r"texts\[1\] is None: expected a string, or a tuple of two", encoder.encode, ["red", None], {}),
        ("expected a string, or a tuple of two strings for a pair", encoder.encode, ("a", "b", "c"), {}),
        ("layers=3: expected numbers from 0 to 2", encoder.encode, "red", {"layers": 3}),
        ('or "all"', encoder.encode, "red", {"layers": "last"}),
        (r"layers=\[\]: expected numbers from 0 to 2 .*, at least one", encoder.encode, "red", {"layers": []}),
        ("max_length=25: expected 5 to 24", encoder.encode, "red", {"max_length": 25}),
        ("max_length='9': expected 5 to 24", encoder.encode, "red", {"max_length": "9"}),
        ("batch_size=0: expected a whole number of at least 1", encoder.encode, ["red"], {"batch_size": 0}),
        ("batch_size=2.5: expected", encoder.pool, ["red"], {"batch_size": 2.5}),
        ("how='sum': expected one of mean, cls, max", encoder.pool, "red", "sum", {}),
        ("layer='all': expected one number from 0 to 2, or -1 for the last", encoder.pool, "red", {"layer": "all"}),
        ("texts=7: expected a string, a tuple of two strings for a pair, or a list", encoder.tokenize, 7, {}),
        (r"^texts is a table \(dict\), expected a list of texts", encoder.pool, {"text": ["red"]}, {}),
    ):
        refused(words, call, *given, **options)


class Series(list):
    """A column that has keys too, as those of pandas have."""

    keys = columns = None

    def tolist(self):
        return list(self)


def test_numbers_of_numpy_are_numbers_and_a_column_of_pandas_is_a_list(encoder):
    assert encoder.pool(Series(["red", "cat"])).shape == (2, encoder.hidden_size)
    for layers in (np.int64(1), np.array([0, 2])):
        expected = encoder.encode("red cat", layers=layers.tolist())
        np.testing.assert_array_equal(encoder.encode("red cat", layers=layers), expected)
    np.testing.assert_array_equal(encoder.pool("red", layer=np.int32(-2)), encoder.pool("red", layer=1))
    np.testing.assert_array_equal(encoder.pool(np.array(["red"]), batch_size=np.int64(2)), encoder.pool(["red"]))
    assert len(encoder.fill_mask("[MASK]", top_k=np.int64(3))[0]) == 3


def test_a_wrong_load_is_one_line(tmp_path):
    for options, words in (
        ({}, "^/.*nowhere: neither a training checkpoint nor a Hugging Face folder"),
        ({"dtype": "half a float"}, "dtype='half a float': expected float32, bfloat16 or float16"),
        ({"device": "gpu"}, "device='gpu': expected cpu, cuda, or cuda:N for the GPU with number N"),
        ({"device": "meta"}, "device='meta': torch cannot compute on it here; leave it out, or give cpu"),
        ({"device": "cuda:99"}, "device='cuda:99': torch sees .* here; leave it out, or give cpu"),
    ):
        refused(words, load_encoder, tmp_path / "nowhere", **options)


def test_fill_mask_without_a_masked_lm_is_one_line(tmp_path, in_folder):
    headless = load_encoder(in_folder("BertModel"), device="cpu")
    assert headless.encode("red").shape == (3, 32)
    refused("BertModel: fill_mask needs a masked-LM head; the folder lacks", headless.fill_mask, "[MASK]")
    discriminator = load_encoder(write_checkpoint(tmp_path / "run", tokenizer_in(tmp_path), "electra"), device="cpu")
    words = "iter_0000003: fill_mask needs a masked-LM head; the run trained a discriminator"
    refused(words, discriminator.fill_mask, "[MASK]")


def test_half_precision_gives_float32_arrays_and_an_encoder_says_what_it_is(run, exported, encoder):
    exact = encoder.encode(TEXTS[0])
    for folder in (run, exported[0]):
        half = load_encoder(folder, device="cpu", dtype="bfloat16")
        states = half.encode(TEXTS[0])
        assert states.dtype == np.float32 and half.model.embeddings.token.weight.dtype == torch.bfloat16
        assert 0 < np.abs(states - exact).max() < 0.1 * np.abs(exact).max()
    assert repr(encoder) == (
        f"<TextEncoder {run}/iter_0000003: ddrp positions, 2 layers x 32, {encoder.num_parameters:,} parameters, "
        "20 pieces, rows of up to 24, float32 on cpu>"
    )


def test_the_documentation_runs(encoder, capsys):
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text(encoding="utf-8")
    for section in ("Hidden states", "Sentence vectors", "Filled masks", "An untrained model"):
        names = {"encoder": encoder, "texts": TEXTS}
        exec(page.split(f"## {section}\n")[1].split("```python\n")[1].split("```")[0], names)
        assert ("%" in capsys.readouterr().out) == (section == "Filled masks"), section
    assert names["states"].shape == (2, 16, 256)


ELSEWHERE = """
import sys

sys.modules["fcntl"] = sys.modules["deepspeed"] = None  # absent
from megatron_ddrp import load_encoder
encoder = load_encoder(sys.argv[1])
print(encoder.pool("red").shape[0], encoder.fill_mask("the [MASK] sings.")[0][0].piece)
print(*(name for name in sys.modules if name.startswith(("megatron_ddrp.tasks", "megatron_ddrp.engine"))))
"""
"""A program of a platform without locks and without DeepSpeed; it prints what it imported of tasks and engine."""


def test_an_encoder_works_without_locks_and_deepspeed_and_imports_no_trainer(exported):
    command = [sys.executable, "-c", ELSEWHERE, str(exported[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, others = done.stdout.splitlines()
    assert int(first.split()[0]) > 0 and others == ""


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


@pytest.mark.parametrize("kind", ["run", "export"])
def test_plug_ins_are_forgotten_and_their_new_code_is_read_and_part_of_the_fingerprint(tmp_path, kind):
    plugin, before = tmp_path / "tilt.py", tables()
    plugin.write_text(CODE)
    with plugins_forgotten_after():
        load_plugin(plugin)
        folder = write_checkpoint(tmp_path / "run", tokenizer_in(tmp_path), "mlm", position_encoding="tilt")
        if kind == "export":
            folder = export_checkpoint(folder, tmp_path / "export").output

    def fingerprints():
        with plugins_within([plugin]):
            loads = (loading.load_encoder, load_masked_lm)
            return [load(folder, is_random).fingerprint for load in loads for is_random in (False, True)]

    of_first = fingerprints()
    assert fingerprints() == of_first
    first = load_encoder(folder, device="cpu", plugins=[plugin])
    assert tables() == before
    vector, masked = first.pool("the red cat"), first.fill_mask("the [MASK] cat")
    plugin.write_text(CODE.replace("-1.5", "1.5"))
    assert not set(fingerprints()) & set(of_first)
    changed = load_encoder(folder, device="cpu", plugins=iter([str(plugin)]))
    assert np.abs(changed.pool("the red cat") - vector).max() > 0.1
    assert abs(changed.fill_mask("the [MASK] cat")[0][0].probability - masked[0][0].probability) > 1e-3
    np.testing.assert_array_equal(first.pool("the red cat"), vector)
    assert tables() == before
    plugin.write_text("ENCODINGS = {'tilt': 3}")
    refused("expected a class derived from PositionEncoding", load_encoder, folder, plugins=[plugin])
    assert tables() == before


def test_a_thread_that_fills_a_mask_leaves_the_states_of_another_alone(in_folder):
    encoder = load_encoder(in_folder("BertForMaskedLM"), device="cpu")
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


@pytest.mark.parametrize(("has_bars", "hub_has_bars"), [(True, False), (False, True)])
def test_transformers_speaks_as_before_a_load(has_bars, hub_has_bars, in_folder):
    logging, hub = transformers.logging, huggingface_hub.utils
    folder = in_folder("BertForMaskedLM")
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


def test_an_encoder_without_a_pooler_gives_no_pooled_vector_and_texts_without_a_known_piece_are_counted(in_folder):
    for name in ("RobertaModel", "AlbertModel", "MPNetModel", "BertModel"):
        encoder = load_encoder(in_folder(name), device="cpu")
        with torch.inference_mode():
            output = encoder.model(torch.tensor([[2, 6, 7, 3]]))
        assert output.pooler_output is None and output.last_hidden_state.shape == (1, 4, 32), name
    told = r"^2 of 4 texts had no piece but \[UNK\]: the vocabulary knows nothing in them; use an encoder of their"
    for call in (encoder.pool, encoder.encode):
        with pytest.warns(UserWarning, match=told) as warned:
            call(["red", "Доброе утро", "", ("да", "нет")])
        assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.pool(["red да", "", ("red", "нет")])
