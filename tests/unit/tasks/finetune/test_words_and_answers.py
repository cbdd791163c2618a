"""`python -m tasks.finetune` on CoNLL and SQuAD files: what is kept, predicted and written as text again."""

import io
import json
import os
import random

import pytest
import torch

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.table_files import conll_text, read_rows
from tests.unit.tasks.glue.conftest import WORDS, write_checkpoint

QUICK = ["--lr", "1e-2", "--batch-size", "16", "--epochs", "2", "--seeds", "1"]


def fine_tune(folder, ending, load, *more):
    """Train on train.ENDING, score valid.ENDING; return the row of runs.jsonl, predictions and the model's folder."""
    files = ["--train", folder / f"train{ending}", "--valid", folder / f"valid{ending}"]
    main([str(word) for word in (*files, "--load", load, "--output-dir", folder / "out", *QUICK, *more)])
    (row,) = map(json.loads, (folder / "out" / "runs.jsonl").read_text().splitlines())
    stored = [line.split("\t") for line in (folder / "out" / row["predictions"]).read_text().splitlines()[1:]]
    (model,) = (path for path in (folder / "out" / "models").iterdir() if path.is_dir())
    return row, [json.loads(prediction) for _, _, prediction, _ in stored], model


def predict(model, source, output):
    main(["predict", "--load", str(model), "--input", str(source), "--output", str(output)])
    return output


@pytest.fixture
def tagged(tmp_path):
    """Sentences of the encoders' words in CoNLL's layout: colours and animals are entities of one word or two."""
    draw = random.Random(2)
    for name, count in (("train", 64), ("valid", 12)):
        sentences = []
        for _ in range(count):
            words = [draw.choice(WORDS) for _ in range(draw.randrange(2, 30))]
            kinds = [("COLOUR", "ANIMAL", None)[WORDS.index(word) // 3] for word in words]
            before = [None, *kinds]
            tags = ["O" if k is None else f"{'I' if k == b else 'B'}-{k}" for k, b in zip(kinds, before, strict=False)]
            sentences.append(conll_text(words, tags))
        (tmp_path / f"{name}.conll").write_text("-DOCSTART- O\n\n" + "".join(sentences))
    return tmp_path


def test_tags_are_kept_predicted_and_written_as_conll(tagged, bert_folder, capsys):
    from transformers import AutoModelForTokenClassification

    row, stored, folder = fine_tune(tagged, ".conll", bert_folder)
    assert "tokens, seqeval; text from tokens, label from tags" in capsys.readouterr().out
    assert row["metric"] == "seqeval" and row["dev_examples"] == 12
    valid = [row.cells for row in read_rows(str(tagged / "valid.conll"))]
    (tagged / "words.conll").write_text("\n\n".join("\n".join(cells["tokens"]) for cells in valid))
    told = predict(folder, tagged / "words.conll", tagged / "told.conll")
    assert [row.cells for row in read_rows(str(told))] == [
        {"tokens": cells["tokens"], "tags": tags} for cells, tags in zip(valid, stored, strict=True)
    ]
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    (short, tags) = next((c["tokens"], t) for c, t in zip(valid, stored, strict=True) if len(c["tokens"]) < 10)
    ids = torch.tensor([[2, *(5 + WORDS.index(word) for word in short), 3]])
    logits = model(ids).logits[0, 1:-1]
    assert [model.config.id2label[number] for number in logits.argmax(dim=-1).tolist()] == tags


def test_tags_of_a_checkpoint_of_ours(tagged, checkpoint_folder):
    """It knows 16 positions: longer sentences are several rows, when it learns and when it predicts."""
    _, stored, folder = fine_tune(tagged, ".conll", checkpoint_folder, "--metric", "macro-f1")
    assert main(["--report", str(tagged / "out"), "--output-dir", str(tagged / "again")]) == 0
    assert (tagged / "again" / "table.md").read_text() == (tagged / "out" / "table.md").read_text()
    told = predict(folder, tagged / "valid.conll", tagged / "told.jsonl")
    assert [json.loads(line)["prediction"] for line in told.read_text().splitlines()] == stored


@pytest.fixture
def asked(tmp_path):
    """Questions for the animal in SQuAD's layout; every third has no answer."""
    draw = random.Random(3)
    for name, count in (("train", 48), ("valid", 9)):
        paragraphs = []
        for number in range(count):
            words = [draw.choice(WORDS[:3] + WORDS[6:]) for _ in range(draw.randrange(2, 30))]
            words[0] = draw.choice(WORDS[3:6]) if number % 3 else words[0]
            answers = [{"text": words[0], "answer_start": 0}] if number % 3 else []
            question = {"id": f"{name}-{number}", "question": "sleeps", "answers": answers}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return tmp_path


def test_answers_are_kept_predicted_and_written_for_squads_script(asked, checkpoint_folder, capsys):
    row, stored, folder = fine_tune(asked, ".json", checkpoint_folder, "--metric", "exact-match", "--name", "squad")
    printed = capsys.readouterr().out
    assert "qa, exact-match; text from question + context, label from answers" in printed
    assert "train: no answer 16" in printed
    assert row["score"] == row["epoch_scores"][-1] <= row["beside"]["f1"]
    assert f"| squad | f1 | {100 * row['beside']['f1']:.2f} |" in printed
    assert main(["--report", str(asked / "out"), "--output-dir", str(asked / "again")]) == 0
    assert (asked / "again" / "table.md").read_text() == (asked / "out" / "table.md").read_text()
    told = json.loads(predict(folder, asked / "valid.json", asked / "told.json").read_text())
    assert told == {f"valid-{number}": answer for number, answer in enumerate(stored)}
    with pytest.raises(UserError, match=r"told.conll: expected a name that ends in .jsonl, .csv, .tsv, .json$"):
        predict(folder, asked / "valid.json", asked / "told.conll")


COLOURS = {"красный", "rot", "赤い", "rouge"}
FILLERS = ["дом", "Häuser", "ist", "は", "l'été", "и", "naïve", "家"]


@pytest.fixture
def multilingual(tmp_path):
    """A checkpoint of ours with a SentencePiece model, and sentences of four languages with colours as entities."""
    sentencepiece = pytest.importorskip("sentencepiece")
    draw = random.Random(4)
    for name, count in (("train", 64), ("valid", 16)):
        rows = [[draw.choice([*sorted(COLOURS), *FILLERS]) for _ in range(draw.randrange(2, 20))] for _ in range(count)]
        tags = [["B-COLOUR" if word in COLOURS else "O" for word in words] for words in rows]
        text = "".join(map(conll_text, rows, tags))
        (tmp_path / f"{name}.conll").write_text(text, encoding="utf-8")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join([*sorted(COLOURS), *FILLERS])] * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "m.model"
    path.write_bytes(model.getvalue())
    return write_checkpoint(tmp_path / "run", build_tokenizer("SentencePiece", tokenizer_model=path), "ddrp")


def test_words_of_any_language_through_sentencepiece(multilingual, tmp_path):
    row, stored, folder = fine_tune(tmp_path, ".conll", multilingual, "--epochs", "5")
    assert row["score"] > 0.8 > row["baseline"]
    told = predict(folder, tmp_path / "valid.conll", tmp_path / "told.conll")
    assert [row.cells["tags"] for row in read_rows(str(told))] == stored


def test_training_takes_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "train.conll")
    with pytest.raises(UserError, match=r"train.conll: a pipe, but training reads its files several times"):
        fine_tune(tmp_path, ".conll", "nowhere")


def test_tags_that_name_no_entities_are_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "train.conll").write_text("runs VB\nthe DT\n")
    (tmp_path / "valid.conll").write_text("runs VB\n")
    with pytest.raises(UserError, match=r"train.conll: tag 'DT', expected O, or B- or I- and a type"):
        fine_tune(tmp_path, ".conll", "nowhere")
