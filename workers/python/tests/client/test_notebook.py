"""The example notebook, cell by cell, against a real cluster."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLE = Path(__file__).parents[4] / "examples" / "notebook"


class Notebook(unittest.TestCase):
    def test_every_cell_of_the_example_does_what_it_says(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("sweep.ipynb", "descend.py"):
                shutil.copy(EXAMPLE / name, folder)
            book = nbformat.read(Path(folder) / "sweep.ipynb", as_version=4)
            client = NotebookClient(
                book, timeout=120, resources={"metadata": {"path": folder}}, kernel_name="python3"
            )
            client.execute()
        shown = "\n".join(
            output.get("text") or str(output.get("data", {}))
            for cell in book.cells
            if cell.cell_type == "code"
            for output in cell.outputs
        )
        for words in ("<svg", "x,y", "0.05 failed", "too large", "'rate': 0.001}", "dataframe"):
            self.assertIn(words, shown)


if __name__ == "__main__":
    unittest.main()
