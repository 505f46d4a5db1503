"""examples/quickstart.ipynb runs from its first cell to its last, as in Jupyter, and is kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from one_cpu import on_one_cpu

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.full
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    with on_one_cpu():
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()  # raises for a cell
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in shown)
    assert "loss of held-out bytes" in text and "alpha 1.0" in text and "tokens per GPU and second" in text
    assert any("image/png" in output.get("data", {}) for output in shown), "the curve is drawn"
