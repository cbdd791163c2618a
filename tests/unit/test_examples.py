"""Every recipe parses, says at its top what it is, and its training command passes a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples").glob("*.sh"))
TRAINING = [path for path in RECIPES if path.name.startswith("pretrain_")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_it_needs_and_gives(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("set -euo pipefail")[0]
    for word in ("hardware", "time", "result"):
        assert f"#   {word}" in head, f"{path.name} does not say its {word} on top"
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_a_training_recipe_runs_dry(path: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]) + "\n")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DATA": write_dataset(tmp_path),
        "VOCAB": str(vocabulary),
        "SAVE": str(tmp_path / "save"),
        "DRY_RUN": "1",
    }
    done = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    encoders = 1 + ("electra" in path.name)
    absolute = 512 * (768 + (256 if encoders == 2 else 0))  # a generator's are as wide as it
    relative = 67 * 64 * encoders  # D and K^rd at head size 64
    assert facts["position_parameters"] == (absolute if "tnf" in path.name else relative)
    assert facts["memory_per_rank_bytes"] > 0
    assert not (tmp_path / "save").exists()


def write_dataset(folder: Path) -> str:
    """Twenty documents of 40 tokens."""
    from megatron_ddrp.data.indexed_dataset import IndexedDatasetWriter

    prefix = str(folder / "corpus_text_document")
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(20):
            writer.append([5 + i % 8 for i in range(40)])
            writer.end_document()
        writer.finalize()
    return prefix
