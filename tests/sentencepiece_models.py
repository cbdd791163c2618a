"""Small SentencePiece models for tests."""

import io

TEXTS = ["the unaffable cafes sat", "naive cats sat on mats", "the cats were singing"] * 30


def train_model(path, texts=TEXTS, **options):
    """Train a model on `texts` with the trainer's `options`, write it to `path` and return the path."""
    import sentencepiece

    written = io.BytesIO()
    size = {"vocab_size": 330 if options.get("byte_fallback") else 60, "hard_vocab_limit": False}
    settings = {"model_type": "unigram", "minloglevel": 2} | size | options
    if settings["model_type"] != "unigram":
        del settings["hard_vocab_limit"]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=written, **settings)
    path.write_bytes(written.getvalue())
    return path
