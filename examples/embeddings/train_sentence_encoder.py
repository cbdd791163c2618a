"""Train a sentence encoder with sentence-transformers, from one of our exports or any other Hugging Face folder.

    pip install sentence-transformers datasets accelerate
    python examples/embeddings/train_sentence_encoder.py --load HF_DIR --pairs train.jsonl --output sentence_encoder

Each line of the file is {"sentence1": "…", "sentence2": "…", "score": 4.2}; scores go from 0 to --max-score. The
embedding of a text is the mean of its last hidden states, and the loss is the squared error of the cosine of the two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def read_pairs(path: Path, max_score: float) -> list[dict[str, str | float]]:
    """Return the rows of a file, their scores divided by `max_score`."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        {"sentence1": row["sentence1"], "sentence2": row["sentence2"], "score": row["score"] / max_score}
        for row in rows
    ]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="Hugging Face folder of an encoder")
    parser.add_argument("--pairs", type=Path, required=True, help="JSONL of scored pairs")
    parser.add_argument("--output", type=Path, required=True, help="folder of the sentence encoder")
    parser.add_argument("--max-score", type=float, default=5.0, help="score of equal meaning (default 5, as STS-B)")
    parser.add_argument("--max-seq-length", type=int, default=128, help="pieces kept per text")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train on the pairs and write the sentence encoder."""
    options = parse()
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    # Exports have mean pooling, or the modules of their origin. trust_remote_code runs the folder's own model code.
    model = SentenceTransformer(str(options.load), trust_remote_code=True, local_files_only=True)
    model.max_seq_length = options.max_seq_length
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(options.output),
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        num_train_epochs=options.epochs,
        warmup_steps=0.1,  # of all steps
        save_strategy="no",
        report_to=[],
        seed=options.seed,
    )
    pairs = Dataset.from_list(read_pairs(options.pairs, options.max_score))
    loss = CosineSimilarityLoss(model)
    SentenceTransformerTrainer(model, args=settings, train_dataset=pairs, loss=loss).train()
    model.save_pretrained(str(options.output))
    print(f'wrote {options.output}: SentenceTransformer("{options.output}", trust_remote_code=True)')


if __name__ == "__main__":
    main()
