"""Write a tiny BERT as transformers does: `python -m tests.endurance.damage.foreign_bert VOCAB FOLDER`."""

import shutil
import sys
from pathlib import Path


def main() -> None:
    vocab_file, folder = map(Path, sys.argv[1:])
    import torch
    import transformers

    torch.manual_seed(0)
    pieces = len(vocab_file.read_text(encoding="utf-8").splitlines())
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=pieces, max_position_embeddings=32, initializer_range=0.2, **sizes)
    model = transformers.BertForMaskedLM(config)
    model.config.initializer_range = 0.02  # as where nothing is said, so that its absence changes nothing
    model.save_pretrained(folder)
    shutil.copy(vocab_file, folder / "vocab.txt")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
