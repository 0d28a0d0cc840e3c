"""sacreBLEU's paired tests of runs, against its own command on the same files."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from headwise.errors import DataError
from headwise_lab.results import statistics
from headwise_lab.results.statistics import (
    Pair,
    PairedTests,
    SystemTest,
    compute_p_values,
    read_paired_tests,
    run_paired_tests,
)

WORDS = ["der", "die", "das", "hund", "katze", "läuft", "über", "unter", "großen", "garten", "wiese", "und"]


def text(seed: int, wrong: float, items: int = 40) -> list[str]:
    """Lines of which a share of the words is another than in the references, which have none wrong."""
    reference, draw = random.Random(3), random.Random(seed)
    lines = [reference.choices(WORDS, k=reference.randint(5, 14)) for _ in range(items)]
    return [" ".join(w if draw.random() >= wrong else draw.choice(WORDS) for w in line) for line in lines]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, list[Pair]]:
    """References, and the runs of two arms against one control under two seeds."""
    pairs = []
    for seed in (0, 1):
        baseline = write(tmp_path / "plain" / f"seed-{seed}" / "predictions.txt", text(10 + seed, 0.4))
        for arm, wrong in (("better", 0.1), ("same", 0.4)):
            system = write(tmp_path / arm / f"seed-{seed}" / "predictions.txt", text(20 + seed, wrong))
            pairs.append(Pair(arm, "plain", seed, system, baseline))
    return write(tmp_path / "references.txt", text(0, 0.0)), pairs


def by_command(kind: str, references: Path, *systems: Path) -> list[list[str]]:
    """The p-values of BLEU and chrF of each system but the first, as the command prints them."""
    command = [sys.executable, "-m", "sacrebleu", str(references), "-i", *map(str, systems)]
    command += [f"--paired-{kind}", "-m", "bleu", "chrf", "--format", "text"]
    environment = {name: value for name, value in os.environ.items() if name != "SACREBLEU_SEED"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [re.findall(r"p = ([\d.]+)", line) for line in answer.stdout.splitlines()]
    return [values for values in found if values]


@pytest.mark.full
def test_the_p_values_are_those_of_sacrebleus_own_command(files, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    references, pairs = files
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in (pairs[0].baseline, pairs[0].system)}
    second = pairs[1].system.read_text(encoding="utf-8").splitlines()
    tests, signatures = compute_p_values(
        lines[pairs[0].baseline],
        {"better": lines[pairs[0].system], "same": second},
        references.read_text(encoding="utf-8").splitlines(),
    )
    assert os.environ["SACREBLEU_SEED"] == "99"
    for kind, name, title in (
        ("bs", "bootstrap", "paired bootstrap"),
        ("ar", "randomisation", "approximate randomisation"),
    ):
        shown = by_command(kind, references, pairs[0].baseline, pairs[0].system, pairs[1].system)
        ours = [[f"{getattr(test, name):.4f}" for test in tests[system]] for system in ("better", "same")]
        assert shown == ours
        assert all("seed:12345" in signatures[f"{metric}, {title}"] for metric in ("BLEU", "chrF"))
    assert [test.metric for test in tests["better"]] == ["BLEU", "chrF"]
    expected = sacrebleu.corpus_chrf(lines[pairs[0].system], [references.read_text(encoding="utf-8").splitlines()])
    assert tests["better"][1].score == pytest.approx(expected.score)
    assert tests["better"][0].bootstrap < 0.05 < tests["same"][0].bootstrap


def count_words(baseline: list[str], systems: dict[str, list[str]], references: list[str]):
    """Tests that take no time: a score is the share of correct words, and a lead of a tenth is significant."""

    def share(lines: list[str]) -> float:
        words = [
            one == other
            for line, right in zip(lines, references, strict=True)
            for one, other in zip(line.split(), right.split(), strict=False)
        ]
        return sum(words) / len(words)

    against = share(baseline)
    tests = {
        name: tuple(SystemTest(metric, share(lines), against, p, p) for metric in ("BLEU", "chrF"))
        for name, lines in systems.items()
        for p in (0.01 if abs(share(lines) - against) > 0.1 else 0.5,)
    }
    return tests, {f"{metric}, a test": "counted" for metric in ("BLEU", "chrF")}


def test_tests_are_kept_and_only_new_or_changed_texts_are_tested_again(files, tmp_path, monkeypatch):
    references, pairs = files
    kept, asked = tmp_path / "paired.json", []

    def counted(baseline, systems, expected):
        asked.append(list(systems))
        return count_words(baseline, systems, expected)

    monkeypatch.setattr(statistics, "compute_p_values", counted)
    assert list(run_paired_tests(pairs[:2], references, kept)) == [0, 2]
    assert list(run_paired_tests(pairs, references, kept)) == [2, 4]
    assert asked == [["better", "same"], ["better", "same"]]
    first = kept.read_bytes()
    assert list(run_paired_tests(pairs, references, kept)) == [4]
    assert kept.read_bytes() == first

    found, signatures = read_paired_tests(pairs, references, kept)
    assert [(tests.arm, tests.metric, tests.seeds) for tests in found] == [
        (arm, metric, (0, 1)) for metric in ("BLEU", "chrF") for arm in ("better", "same")
    ]
    assert (found[0].ahead, found[0].behind) == (2, 0)
    assert signatures == {"BLEU, a test": "counted", "chrF, a test": "counted"}

    write(pairs[3].system, text(77, 0.9))
    known = [(tests.arm, tests.seeds) for tests in read_paired_tests(pairs, references, kept)[0]]
    assert known[:2] == [("better", (0, 1)), ("same", (0,))]
    assert list(run_paired_tests(pairs, references, kept)) == [3, 4]
    assert asked[2:] == [["same"]]
    assert read_paired_tests(pairs, references, kept)[0][1].behind == 1
    assert len(json.loads(kept.read_text())["tests"]) == 4


def test_a_summary_counts_directions_and_pools_no_p_value():
    numbers = ((31.0, 0.02, 0.03), (29.0, 0.05, 0.06), (32.0, 0.051, 0.04), (28.0, 0.01, 0.02))
    each = tuple(SystemTest("BLEU", score, 30.0, *p_values) for score, *p_values in numbers)
    tests = PairedTests("svgd", "plain", "BLEU", (0, 1, 2, 3), each)
    assert tests.difference == pytest.approx(0.0)
    assert (tests.ahead, tests.behind) == (1, 2)


def test_files_that_do_not_fit_are_refused_by_name_and_without_references_nothing_is_tested(files, tmp_path):
    references, pairs = files
    kept = tmp_path / "paired.json"
    write(pairs[0].system, text(1, 0.2, items=39))
    with pytest.raises(DataError, match=r"predictions\.txt has 39 lines, its references 40; delete .*better"):
        list(run_paired_tests(pairs, references, kept))
    pairs[0].system.unlink()
    with pytest.raises(DataError, match=r"predictions\.txt does not exist; delete the folder"):
        list(run_paired_tests(pairs, references, kept))
    unknown = {"metric": "TER", "score": 1.0, "baseline": 1.0, "bootstrap": 1.0, "randomisation": 1.0}
    for spoiled in ({"metric": "BLEU"}, unknown):
        kept.write_text(json.dumps({"signatures": {}, "tests": {"a": [spoiled]}}))
        with pytest.raises(DataError, match=r"paired\.json does not hold paired tests; delete it"):
            list(run_paired_tests(pairs[1:], references, kept))
    assert read_paired_tests(pairs, tmp_path / "missing.txt", tmp_path / "paired.json") == ((), {})
