"""`--plugin FILE.py`: an encoding and an objective from outside of the package train, also cut up, and are exported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import plugins_forgotten_after
from megatron_ddrp.run.metrics import read_rows
from tests.integration.launch import Result, start_ranks

Flags = Callable[..., list[str]]

FILES = [Path(__file__).with_name(name) for name in ("plugin_encoding.py", "plugin_objective.py")]
NAMES = ["--position-encoding", "slopes", "--objective", "counting", "--objective-options", "weight=0.7"]
VALIDATION = {"eval_interval": 5, "eval_iters": 1, "save_interval": 5}


@pytest.fixture
def plugins(tmp_path: Path) -> list[str]:
    """The flags that load both files, from a folder of the user's."""
    words = []
    for file in FILES:
        own = tmp_path / f"my_{file.name}"
        own.write_bytes(file.read_bytes())
        words.append(str(own))
    return ["--plugin", *words]


def convert(run: Path, output: Path, *words: str) -> Result:
    return start_ranks(["--load", run, "--output", output, *words], None, program="tools/convert_checkpoint.py")


LOADS = """
import json, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron_ddrp":
            raise ImportError("an exported folder stands alone")
sys.meta_path.insert(0, Nothing())
import torch
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(5, 25).view(2, 10)
with torch.no_grad():
    print(json.dumps(model(input_ids=ids, output_hidden_states=True).hidden_states[-1].tolist()))
"""


@pytest.mark.slow
def test_it_trains_alike_in_every_layout_is_recorded_exported_and_loaded_alone(
    flags: Flags, plugins: list[str], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    start_ranks([*plugins, *flags(save=one, **VALIDATION), *NAMES]).check()
    start_ranks([*plugins, *flags(save=two, tensor_model_parallel_size=2, **VALIDATION), *NAMES], world_size=2).check()
    rows = read_rows(one)
    for row, other in zip(rows, read_rows(two), strict=True):
        for name in {"loss", "lm_loss", "count_loss", "grad_norm", "valid_count_loss"} & row.keys():
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    first = rows[0]
    assert first["loss"] == pytest.approx(first["lm_loss"] + 0.7 * first["count_loss"]) and first["mean_length"] > 2
    assert rows[-1]["valid_count_loss"] > 0
    assert {path.name for path in (one / "plugins").iterdir()} == {"my_plugin_encoding.py", "my_plugin_objective.py"}

    refused = convert(one, tmp_path / "huggingface")
    (line,) = refused.stderr[0].splitlines()
    assert refused.exit_codes == [2] and "--plugin" in line and "damaged" not in line
    changed = Path(plugins[1])
    changed.write_text(changed.read_text() + "# another line\n")
    again = start_ranks([*plugins, *flags(save=one, load=one, train_iters=6, **VALIDATION), *NAMES]).check()
    told = "--plugin my_plugin_encoding.py: changed since the run began; its new code is kept as plugins/"
    assert told + "my_plugin_encoding-2.py" in again.stdout[0] and len(list((one / "plugins").iterdir())) == 3
    forgotten = start_ranks(flags(save=one, load=one, train_iters=9, **VALIDATION))
    assert forgotten.exit_codes == [2] and "--plugin" in forgotten.stderr[0] and "damaged" not in forgotten.stderr[0]
    for words, told in (((), "unknown: "), (plugins, "slopes + counting")):
        report = ["--load", one, "--output-dir", tmp_path / "report", *words]
        start_ranks(report, None, program="tools/training_report.py").check()
        assert told in (tmp_path / "report" / "report.md").read_text()
    convert(one, tmp_path / "huggingface", *plugins).check()
    loaded = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "huggingface")],
        **{"capture_output": True, "text": True, "timeout": 300},
        cwd=tmp_path,
    )
    assert loaded.returncode == 0, loaded.stderr
    theirs = torch.tensor(json.loads(loaded.stdout.splitlines()[-1]))
    ours = run_encode(one, plugins)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def run_encode(run: Path, plugins: list[str]) -> torch.Tensor:
    """Return the last hidden states of a checkpoint."""
    ids = torch.arange(5, 25).view(2, 10)
    with plugins_forgotten_after():
        for file in plugins[1:]:
            load_plugin(Path(file))
        model, _, _ = load_model(run)
        return model.eval().encode(ids, ids * 0, ids * 0 + 1, torch.arange(10).expand(2, -1))


@pytest.mark.parametrize(
    "text, line",
    [
        ("ENCODINGS = {}", "adds nothing"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("class A: pass\nOBJECTIVES = {'mth': A}", "OBJECTIVES names 'mth', which is taken: choose another name"),
        ("ENCODINGS = {'mine': 3}", "ENCODINGS['mine'] is 3: expected a class derived from PositionEncoding"),
        ("class A: pass\nOBJECTIVES = {'mine': A}", "expected a class derived from Objective"),
        (None, "cannot be read: expected a Python file"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str | None, line: str, flags: Flags, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    done = start_ranks([*flags(), "--plugin", file], None)
    assert done.exit_codes == [2] and len(done.stderr[0].splitlines()) == 1, done.stderr
    assert line in done.stderr[0] and "--plugin" in done.stderr[0]
