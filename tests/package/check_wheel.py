"""Builds the wheel, installs it into a bare environment and uses it there: `make wheel`.

The bare environment has the wheel and, for its models, transformers; none of the laboratory's packages is asked for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from run_command import run

ROOT = Path(__file__).parents[2]
DIST = ROOT / "build" / "dist"

VERIFY = """
import sys
import torch
from transformers import BertConfig, BertModel
import headwise as hw

sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = BertModel(BertConfig(vocab_size=100, **sizes)).eval()
tokens = torch.randint(0, 100, (2, 8))
print(hw.verify(hw.find_heads(model), [tokens]))
assert "site-packages" in hw.__file__, hw.__file__
"""


def main() -> None:
    """Build, look into the wheel, install it alone, and use it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(DIST), str(ROOT))
    (wheel,) = DIST.glob("headwise-*.whl")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), wheel)
        print(run(python, "-I", "-c", VERIFY, cwd=folder))
        command = [python, "-m", "headwise", "compare", "logic"]
        refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        expected = "those of the laboratory need the package headwise-lab."
        if refused.returncode != 2 or not refused.stderr.strip().endswith(expected):
            sys.exit(f"without the laboratory the command ended with {refused.returncode}: {refused.stderr}")
        print(refused.stderr.strip())
        check_import_time(python, folder)
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 2**10:.0f} KiB, installs and works alone")


def check_contents(wheel: Path) -> None:
    """Check that the wheel has the library with its types and no tests, and only what it says in its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(name for name in names if name.endswith("METADATA"))).decode())
    top = {name.partition("/")[0] for name in names}
    version = metadata["Version"]
    if top != {"headwise", f"headwise-{version}.dist-info"} or "headwise/py.typed" not in names:
        sys.exit(f"{wheel} has {sorted(top)}; expected headwise with py.typed, and its metadata.")
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    if [line.partition(">")[0] for line in needed] != ["torch"]:
        sys.exit(f"{wheel} needs {needed}; expected torch alone.")


def make_environment(folder: Path, wheel: Path) -> str:
    """Return the Python of a new environment with the wheel and transformers."""
    run(sys.executable, "-m", "venv", str(folder / "bare"))
    python = str(folder / "bare" / "bin" / "python")
    run(
        python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel), "transformers>=5.17"
    )
    return python


def check_import_time(python: str, folder: str) -> None:
    """Print how long the library takes to import after torch: the names are loaded by the first use of one."""
    statement = "import headwise; headwise.find_heads"
    code = f"import torch, time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    seconds = min(float(run(python, "-I", "-c", code, cwd=folder)) for _ in range(3))
    print(f"import of headwise after torch: {seconds:.2f} s (the least of 3)")


if __name__ == "__main__":
    main()
