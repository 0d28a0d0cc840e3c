"""Run what `make demo` runs, with nothing to resume, and keep what it printed, its pictures and its time.

Run by `make bench NAME=demo`. The README shows the record named in docs/generate_pages.py.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headwise.input_files import encode_json
from timing import RECORDS, console, default_device, new_record

ROOT = Path(__file__).parents[1]
KEPT = ("results.json", "figures/effective-heads.png", "figures/half-of-the-heads.png")


def main() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^demo: .*\n\t\$\(BIN\)/headwise (?P<words>.*) \$\(ARGS\)$", makefile, re.MULTILINE)
    assert found is not None, "the Makefile has no demo."
    record = new_record("demo", default_device())
    folder = RECORDS / f"{record['date']}-demo-{default_device().type}"
    if folder.exists():
        raise SystemExit(f"{folder} is there; records are not overwritten.")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "demo")
        command = [sys.executable, "-m", "headwise", *shlex.split(found["words"])]
        began = time.monotonic()
        # the width of the README
        environment = {**os.environ, "COLUMNS": "80"}
        done = subprocess.run(
            [*command, "--out", str(out)], check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        record |= {"command": f"headwise {found['words']}", "seconds": time.monotonic() - began}
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        record["cpu_seconds"] = used.ru_utime + used.ru_stime
        record["machine"]["load after"] = os.getloadavg()[0]
        folder.mkdir()
        for name in KEPT:
            shutil.copyfile(out / name, folder / Path(name).name)
        (folder / "printed.txt").write_text(done.stdout.replace(str(out), "runs/facts-demo"), encoding="utf-8")
        (folder / "record.json").write_text(encode_json(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"{record['seconds']:.0f} s; written to {folder}")


if __name__ == "__main__":
    main()
