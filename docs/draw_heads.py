"""Draws docs/heads.png by running the first example of the README: `make picture`."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the example where its figure is then moved from."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert example is not None, "README.md has no block of Python."
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(example[1], {})
        (ROOT / "docs" / "heads.png").write_bytes(Path("heads.png").read_bytes())
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
