"""tools/preprocess_data.py beside the `tokenizers` library's own batch calls, and beside Megatron-LM where it is given.

Every arm is a process of its own, timed from its start to its end, on the same cores. The library's arms read the JSON
lines, call `encode_batch` (or `encode_batch_fast`) on 1,000 documents at a time and write nothing; ours writes the
whole dataset. All arms run once per round in random order; an arm's figure is the median over the rounds of our time ÷
its time, with a bootstrap 95 % interval: 0.5 is twice as fast.

    python benchmarks/preprocess.py --input wiki.jsonl --vocab-file vocab.txt
    python benchmarks/preprocess.py --input wiki.jsonl --vocab-file vocab.txt --megatron ../Megatron-LM --rounds 5
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import benchmark_parser, print_ratio, time_rounds

OURS = str(Path(__file__).resolve().parents[1] / "tools" / "preprocess_data.py")
BATCH = """
import json, sys
from tokenizers import BertWordPieceTokenizer
call = getattr(BertWordPieceTokenizer(sys.argv[2], lowercase=True)._tokenizer, sys.argv[1])
texts = []
for line in open(sys.argv[3], encoding="utf-8"):
    texts.append(json.loads(line)["text"])
    if len(texts) == 1000:
        call(texts, add_special_tokens=False)
        texts.clear()
call(texts, add_special_tokens=False)
"""


def process(command: list[str]) -> Callable[[], object]:
    """Return an arm that runs a command to its end."""
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON lines with a text each, not packed")
    parser.add_argument("--vocab-file", required=True, metavar="FILE", help="an uncased vocab.txt")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="cores, and processes, of every arm")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds after one to warm up")
    parser.add_argument("--megatron", metavar="PATH", help="a checkout of Megatron-LM to compare with")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    os.environ["RAYON_NUM_THREADS"] = str(arguments.cores)
    common = ["--input", arguments.input, "--vocab-file", arguments.vocab_file, "--workers", str(arguments.cores)]
    with tempfile.TemporaryDirectory() as folder:
        ours = process([sys.executable, OURS, *common, "--output-prefix", f"{folder}/ours", "--overwrite"])
        arms = {"ours": ours, "ours again (A/A)": ours}
        for name in ("encode_batch", "encode_batch_fast"):
            arms[name] = process([sys.executable, "-c", BATCH, name, arguments.vocab_file, arguments.input])
        if arguments.megatron:
            script = f"{arguments.megatron}/tools/preprocess_data.py"
            flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--output-prefix", f"{folder}/megatron"]
            arms["Megatron-LM"] = process([sys.executable, script, *common, *flags])
        seconds = time_rounds(arms, arguments.rounds, warm_up=1)
    size = os.path.getsize(arguments.input) / 1e6
    print(f"{arguments.input}, {size:.1f} MB, {arguments.cores} cores, {arguments.rounds} rounds, start-up included")
    for name, values in seconds.items():
        print(f"  {name:<18} {size / np.median(values):6.1f} MB/s")
    print("our time ÷ theirs [95 %]:")
    bounds = {"encode_batch": 0.5, "encode_batch_fast": 0.5, "Megatron-LM": 0.1}
    for name, values in list(seconds.items())[1:]:
        print_ratio(name, seconds["ours"] / values, bounds.get(name))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    print(f"largest process of any arm: {largest:.0f} MB resident")


if __name__ == "__main__":
    main()
