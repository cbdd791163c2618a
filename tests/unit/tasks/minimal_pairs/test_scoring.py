"""Heads of masked LMs, and scores of sentences beside a twin in float64 loops."""

import json
import math

import numpy as np
import pytest
import torch

from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import usual_rows
from megatron_ddrp.encoders.masked_lm import HuggingFaceLogits, load_masked_lm, piece_logits
from megatron_ddrp.tasks.minimal_pairs.pairs import SCORES, masked_rows, read_pairs
from megatron_ddrp.tasks.minimal_pairs.scoring import encode_pairs, score_sentences
from tests.refusals import refused
from tests.unit.conversion.conftest import write_checkpoint
from tests.unit.tasks.minimal_pairs.conftest import PAIRS, write_pairs

transformers = pytest.importorskip("transformers")
SENTENCES = [sentence for pair in PAIRS for sentence in pair]


CPU = torch.device("cpu")


def twin(model, tokenizer, pieces, score):
    """Salazar et al., equation 2, and Kauf and Ivanova's two variants, from the logits `[seq, vocab]` of whole rows."""
    words = []
    for name in [tokenizer.pieces[i] for i in pieces]:
        words.append(words[-1] if name.startswith("##") else len(words))
    total = 0.0
    for t, target in enumerate(pieces):
        row = list(pieces)
        for other in range(len(pieces)):
            in_word = words[other] == words[t]
            if other == t or (score == "whole-word" and in_word) or (score == "l2r" and in_word and other > t):
                row[other] = tokenizer.mask_id
        with torch.no_grad():
            logits = model(torch.tensor([[tokenizer.cls_id, *row, tokenizer.sep_id]])).logits[0, t + 1].tolist()
        total += logits[target] - math.log(sum(math.exp(logit) for logit in logits))
    return total


@pytest.fixture(scope="module", params=["absolute", "ddrp", "deberta"])
def both(request, checkpoints, tmp_path_factory):
    """A checkpoint and its export: BERT's classes for absolute, our own for the others."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_checkpoint(checkpoints[request.param], folder)
    return checkpoints[request.param], folder


def scores(folder, score="l2r", budget=64, sentences=SENTENCES):
    encoder = load_masked_lm(folder)
    model = piece_logits(encoder, 0, CPU)
    return score_sentences(model, encoder.tokenizer, encoder.tokenizer.encode_batch(sentences), score, budget)


@pytest.mark.parametrize("score", SCORES)
def test_a_checkpoint_and_its_export_score_as_the_twin(both, score, tokenizer):
    exported = load_masked_lm(both[1]).module.model.double().eval()
    expected = torch.tensor([twin(exported, tokenizer, tokenizer.encode(text), score) for text in SENTENCES])
    assert expected.unique().numel() == len(SENTENCES)
    for folder in both:
        torch.testing.assert_close(torch.tensor(scores(folder, score)), expected.double(), rtol=0, atol=2e-4)


def test_the_kinds_differ_where_a_word_has_several_pieces_and_equal_sentences_are_scored_once(checkpoints):
    found = {score: scores(checkpoints["ddrp"], score) for score in SCORES}
    whole = [scores(checkpoints["ddrp"], score, sentences=["the red cat, the dog."]) for score in SCORES]
    assert whole == [whole[0]] * 3
    for one, other in (("pll", "l2r"), ("l2r", "whole-word")):
        assert abs(found[one] - found[other]).max() > 1e-3
    for budget in (1, 40, 10_000):
        assert abs(scores(checkpoints["ddrp"], budget=budget) - found["l2r"]).max() < 1e-4
    done = []
    encoder = load_masked_lm(checkpoints["absolute"])
    model = piece_logits(encoder, 0, CPU)
    cat, dog = encoder.tokenizer.encode_batch(["the cat.", "the dog."])
    found = score_sentences(model, encoder.tokenizer, [cat, dog, cat], "pll", 100, done.append)
    assert sum(done) == len(cat) + len(dog)
    assert found[0] == found[2] != found[1]


class Pieces:
    """A vocabulary that marks the pieces that begin words."""

    cls_id, sep_id, mask_id = 0, 1, 2

    def __init__(self, *pieces, mark):
        self.pieces, self.rows = ["<s>", "</s>", "<mask>", *pieces], usual_rows(0, 1)
        self.word_starts = np.array([piece.startswith(("<", mark)) for piece in self.pieces])
        self.word_ends = np.zeros(len(self.pieces), bool)


MASKED = {
    "pll": (["?sings.", "the?s.", "thesing?.", "thesings?"], ["0?45", "03?5", "034?"]),
    "l2r": (["?sings.", "the???", "thesing??", "thesings?"], ["0??5", "03?5", "034?"]),
    "whole-word": (["?sings.", "the???", "the???", "the???"], ["0??5", "0??5", "034?"]),
}


@pytest.mark.parametrize("score", MASKED)
def test_words_begin_at_the_mark_and_punctuation_ends_the_word_before_it(score):
    """A text's first piece begins a word without a mark, as byte-level BPE has it; a sentence may begin inside a word.

    Its first word is not that of [CLS], which stays.
    """
    whole, inside = MASKED[score]
    for mark in ("\u2581", "\u0120"):  # of SentencePiece and of byte-level BPE
        vocabulary = Pieces("the", f"{mark}sing", "s", ".", mark=mark)
        (rows,) = masked_rows([[3, 4, 5, 6]], vocabulary, score, 1000)
        pieces = ["?" if piece == "<mask>" else piece.removeprefix(mark) for piece in vocabulary.pieces]
        assert ["".join(pieces[i] for i in row[1:-1]) for row in rows.ids] == whole
        assert rows.places.tolist() == [1, 2, 3, 4] and rows.targets.tolist() == [3, 4, 5, 6]
    (rows,) = masked_rows([[3, 4, 5]], Pieces("s", "ing", "\u2581the", mark="\u2581"), score, 1000)
    assert ["".join(map(str, row)).replace("2", "?") for row in rows.ids] == [f"{row}1" for row in inside]


def test_a_sentence_may_have_all_positions_of_the_encoder(tokenizer, tmp_path):
    (paradigm,) = read_pairs(write_pairs(tmp_path, [("the cat sings.", "the cat.")]))  # the cat sing ##s .
    assert [len(pieces) for side in encode_pairs(paradigm, tokenizer, 7) for pieces in side] == [5, 3]
    said = "line 1: sentence_good has 5 pieces; expected 1 to 4, the number of positions"
    refused(said, encode_pairs, paradigm, tokenizer, 6)


def test_specials_are_never_masked_nor_scored(tokenizer):
    for score in SCORES:
        for rows in masked_rows(tokenizer.encode_batch(SENTENCES), tokenizer, score, 50):
            assert (rows.ids[:, [0, -1]] == [tokenizer.cls_id, tokenizer.sep_id]).all()
            assert (rows.places > 0).all() and (rows.places < rows.ids.shape[1] - 1).all()
            assert rows.ids.size <= max(50, rows.ids.shape[1])


SIZES = {
    **{"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0},
}
FAMILIES = {
    **{"bert": {}, "roberta": {}, "mpnet": {}, "electra": {"embedding_size": 8}, "albert": {"embedding_size": 8}},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}


def assert_logits(model, is_narrow):
    """Compare the logits of one place of each row with those of the whole rows."""
    ids, places = torch.randint(4, 20, (3, 7)), torch.tensor([1, 5, 3])
    with torch.inference_mode():
        expected = model(ids).logits[torch.arange(3), places]
        one_place = HuggingFaceLogits(model)
        torch.testing.assert_close(one_place(ids, places), expected, rtol=0, atol=1e-5 if is_narrow else 0)
    assert one_place.is_narrow == is_narrow
    assert expected.std() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_sees_one_place_and_gives_the_logits_of_the_whole_row(family, torch_seed):
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    assert_logits(transformers.AutoModelForMaskedLM.from_config(config).eval(), is_narrow=True)


def test_a_head_that_takes_its_states_elsewhere_gets_the_whole_row(torch_seed):
    class Elsewhere(torch.nn.Module):
        """The head reads the states of a second pass, at a place of its own."""

        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.base_model = model, model.config, model.base_model

        def forward(self, ids):
            output = self.model(ids)
            output["logits"] = output.logits + torch.arange(output.logits.shape[1])[:, None]
            return output

    assert_logits(Elsewhere(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()), is_narrow=False)


@pytest.mark.parametrize("name", ["BertModel", "ElectraForPreTraining", "BertForSequenceClassification"])
def test_a_folder_without_the_head_is_refused_in_one_line(name, tmp_path, tokenizer):
    cls = getattr(transformers, name)
    cls(cls.config_class(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(tokenizer.pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    refused(r"minimal pairs \(BLiMP\) are not defined: no masked-LM head; the folder lacks", load_masked_lm, tmp_path)


def test_a_discriminator_of_ours_is_refused_as_checkpoint_and_as_export(tmp_path, tokenizer):
    run = write_checkpoint(tmp_path / "run", tokenizer, "electra", position_encoding="ddrp")
    export_checkpoint(run, tmp_path / "hf")
    refused("no masked-LM head; the run trained a discriminator", load_masked_lm, run)
    refused("no masked-LM head; the folder lacks", load_masked_lm, tmp_path / "hf")


def test_random_weights_follow_their_seed_and_are_not_those_of_the_folder(checkpoints):
    drawn, loaded = (load_masked_lm(checkpoints["absolute"], random_init=drawn) for drawn in (True, False))
    ids, places = torch.tensor([[2, 5, 4, 3]]), torch.tensor([2])
    with torch.inference_mode():
        models = ((drawn, 1), (drawn, 1), (drawn, 2), (loaded, 1))
        first, again, *others = (piece_logits(encoder, seed, CPU)(ids, places) for encoder, seed in models)
    assert torch.equal(first, again) and not any(torch.equal(first, other) for other in others)
