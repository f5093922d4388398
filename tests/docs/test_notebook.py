"""examples/notebook.ipynb runs from its first cell to its last in a real kernel, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
DEADLINE_S = 500
"""Of one cell; the longest is a run of eight steps, half a minute on two idle cores."""
STEPS = 8


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_as_nbformat_writes_it_without_outputs(notebook: nbformat.NotebookNode) -> None:
    """Else every run of it would be a change, and what it shows would be another version's."""
    nbformat.validate(notebook)
    assert NOTEBOOK.read_text() == nbformat.writes(notebook) + "\n", "write it with nbformat"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), "clear all outputs before committing"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client's own dependencies
def test_every_cell_runs(notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook keeps its run
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert parameters.source.startswith("STEPS = 60")
    parameters.source = f"STEPS = {STEPS}"
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=DEADLINE_S, kernel_name="python3", resources=resources).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (drawn,) = [kept for kept in outputs.values() if any("image/png" in output.get("data", {}) for output in kept)]
    assert len(drawn) == 1, "each picture takes the place of the one before"
    texts = ["".join(output.get("text", "") for output in kept) for kept in outputs.values()]
    assert sum("--best" in text and "--worst" in text for text in texts) == 1
    assert [text.splitlines()[0][:2] for text in texts if "3> " in text] == ["7>"]
    (run,) = tmp_path.glob("polyrl-*/run")
    assert (run / "report.html").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["phase"] == "rl" for row in rows) == STEPS
