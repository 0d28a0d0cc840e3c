"""A comparison of translation that is killed, more than once and without a warning, ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.tasks.translation.test_translation_task import same_bits
from lab.tasks.translation.translation_text import write_corpus

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[5]
ARMS = {
    "plain": "plain",
    "all": "spos:kinds=self+output:weight=0.7,kinds=self+em:capsules=4,layers=0,kinds=decoder",
}
# the command itself, whose demo is a toy: batches are accumulated, epochs averaged
COMMAND = """
import dataclasses, sys
from headwise.cli.main import main
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES as scales

scales["demo"] = dataclasses.replace(
    scales["demo"], width=16, hidden=16, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.1, vocabulary_size=300,
    tokens=128, epochs=4, warmup_steps=5, accumulation=3, averaged=3, beams=2, train_examples=280, dev_examples=8,
    test_examples=12, compile_routing=False,
)
main(sys.argv[1:])
"""


def started(out: Path, data: Path) -> subprocess.Popen[bytes]:
    arguments = ["compare", "translation", "--arms", ",".join(ARMS.values()), "--seeds", "1", "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--data", str(data), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(out: Path, data: Path) -> None:
    with started(out, data) as process:
        _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said


def runs_of(out: Path) -> list[Path]:
    return [out / arm.replace(":", "@") / "seed-0" for arm in ARMS.values()]


def kill_once(out: Path, data: Path, epoch: int) -> None:
    """Start, wait until some run is past an epoch, and kill every process where it stands."""
    with started(out, data) as process:
        deadline = time.monotonic() + 600
        while not any(list(folder.glob(f"epoch-{epoch}.safetensors")) for folder in runs_of(out)):
            assert process.poll() is None, process.stderr.read() if process.stderr else b""
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_bits(tmp_path):
    data = f"{write_corpus(tmp_path / 'own')}:de-en"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(whole, Path(data))
    for epoch in (1, 2, 3):
        kill_once(parts, Path(data), epoch)
        # workers notice within a second that nobody asks for them any more
        assert not all((folder / "result.json").exists() for folder in runs_of(parts))
    assert any(list(folder.glob("checkpoint-*")) for folder in runs_of(parts))
    finish(parts, Path(data))
    for one, other in zip(runs_of(whole), runs_of(parts), strict=True):
        # the header of the weights names tied tensors in any order
        assert same_bits(one, other)
        for name in ("predictions.txt", "epochs.jsonl", "settings.json", "tokenizer.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
        for result in results:
            for timed in ("step_seconds", "train_seconds", "record_digest", "file_digests"):
                result.pop(timed)
            result["answers"].pop("decoding_seconds")
        assert results[0] == results[1]
        assert sorted(path.name for path in other.iterdir()) == sorted(path.name for path in one.iterdir())
