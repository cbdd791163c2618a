"""The notebook in examples/ runs from its first cell to its last, with few steps."""

import base64
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_encoder.ipynb"
STEPS = 4


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs():
    assert len(code_cells()) > 10
    assert [cell["outputs"] for cell in code_cells() if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.slow
def test_it_runs_from_text_to_filled_masks_and_plots(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs pip install nbclient")
    pytest.importorskip("ipykernel", reason="needs pip install ipykernel")
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    import nbformat

    monkeypatch.setenv("FIRST_ENCODER_STEPS", str(STEPS))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert f"step {STEPS}/{STEPS} | validation" in printed
    assert printed.count("%") >= 4 * 5, "five candidates for each of four masks"
    figures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 3 and all(len(base64.b64decode(figure)) > 5000 for figure in figures)
    shown = next(output.data["text/plain"] for output in outputs if "TextEncoder" in str(output.get("data")))
    assert "ddrp positions, 2 layers x 128" in shown
    assert (tmp_path / "first_encoder" / "huggingface" / "model.safetensors").is_file()
