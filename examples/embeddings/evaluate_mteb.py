"""Score a sentence encoder on your own pairs with mteb: Spearman's correlation of cosines and scores.

    pip install mteb sentence-transformers
    python examples/embeddings/evaluate_mteb.py --load sentence_encoder --pairs dev.jsonl --output scores.json

The file has the format of train_sentence_encoder.py. Nothing is downloaded. To run mteb's own tasks, which mteb
downloads, write `mteb.get_tasks(tasks=["STSBenchmark"])` in place of `[task]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def own_task(rows: list[dict[str, Any]], highest: float) -> Any:
    """Return a similarity task of mteb whose data are `rows`, with scores from 0 to `highest`."""
    from datasets import Dataset
    from mteb import TaskMetadata
    from mteb.abstasks.sts import AbsTaskSTS

    class OwnPairs(AbsTaskSTS):
        min_score, max_score = 0, highest
        metadata = TaskMetadata(
            name="OwnPairs",
            description="Your own scored pairs of sentences",
            type="STS",
            eval_langs=["eng-Latn"],
            eval_splits=["test"],
            main_score="cosine_spearman",
            dataset={"path": "local", "revision": "1"},
        )

        def load_data(self, **_: Any) -> None:
            self.dataset = {"test": Dataset.from_list(rows)}
            self.data_loaded = True

    return OwnPairs()


def main() -> None:
    """Evaluate and write the scores as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="folder of a sentence encoder or of a plain encoder")
    parser.add_argument("--pairs", type=Path, required=True, help="JSONL of scored pairs")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the scores")
    parser.add_argument("--max-score", type=float, default=5.0, help="score of equal meaning (default 5, as STS-B)")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    import mteb
    from sentence_transformers import SentenceTransformer

    with options.pairs.open(encoding="utf-8") as lines:
        task = own_task([json.loads(line) for line in lines], options.max_score)
    model = SentenceTransformer(str(options.load), trust_remote_code=True, local_files_only=True)
    batches = {"batch_size": options.batch_size}
    result = mteb.evaluate(model, [task], encode_kwargs=batches, cache=None, show_progress_bar=False)
    scores = result.task_results[0].scores["test"][0]
    options.output.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    print(f"cosine_spearman {scores['cosine_spearman']:.4f}")


if __name__ == "__main__":
    main()
