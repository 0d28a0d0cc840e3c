"""sacreBLEU's paired significance tests of each run of an arm against its control's run with the same seed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines
from headwise_lab.data.arrays import digest
from headwise_lab.experiment.run_folder import read_json, write_json

# sacreBLEU's defaults, fixed here so that no environment variable or later version changes them.
SEED, RESAMPLES, TRIALS = 12345, 1000, 10_000
METRICS = ("BLEU", "chrF")
LEVEL = 0.05


@dataclass(frozen=True)
class Pair:
    """Two runs of one seed whose translations are tested.

    Attributes:
        arm: Name of the arm.
        against: Name of its control.
        seed: The seed of both.
        system: File of the arm's translations, one line per test item.
        baseline: File of the control's.
    """

    arm: str
    against: str
    seed: int
    system: Path
    baseline: Path


@dataclass(frozen=True)
class SystemTest:
    """Results of sacreBLEU's tests of one system against another.

    Attributes:
        metric: "BLEU" or "chrF".
        score: The system's score, 0 to 100.
        baseline: Score of the other system.
        bootstrap: p-value of the paired bootstrap (Koehn 2004).
        randomisation: p-value of paired approximate randomisation (Riezler and Maxwell 2005).
    """

    metric: str
    score: float
    baseline: float
    bootstrap: float
    randomisation: float


@dataclass(frozen=True)
class PairedTests:
    """The tests of one arm against its control on one metric, one per seed; p-values of seeds are never pooled.

    Attributes:
        arm: Name of the arm.
        against: Name of its control.
        metric: "BLEU" or "chrF".
        seeds: The seeds that both have.
        tests: One test per seed.
    """

    arm: str
    against: str
    metric: str
    seeds: tuple[int, ...]
    tests: tuple[SystemTest, ...]

    def select(self, seeds: Sequence[int]) -> PairedTests:
        """Return the tests of these seeds only."""
        kept = [(seed, test) for seed, test in zip(self.seeds, self.tests, strict=True) if seed in seeds]
        return replace(self, seeds=tuple(seed for seed, _ in kept), tests=tuple(test for _, test in kept))

    @property
    def difference(self) -> float:
        """Mean over seeds of the arm's score minus its control's."""
        return statistics.fmean(test.score - test.baseline for test in self.tests)

    @property
    def ahead(self) -> int:
        """Seeds in which the arm is ahead with a bootstrap p of at most 0.05."""
        return sum(test.score > test.baseline and test.bootstrap <= LEVEL for test in self.tests)

    @property
    def behind(self) -> int:
        """Seeds in which it is behind likewise."""
        return sum(test.score < test.baseline and test.bootstrap <= LEVEL for test in self.tests)


def compute_p_values(
    baseline: Sequence[str], systems: Mapping[str, Sequence[str]], references: Sequence[str]
) -> tuple[dict[str, tuple[SystemTest, ...]], dict[str, str]]:
    """Return each system's tests against the baseline, and the signature of each kind of test.

    Equals `sacrebleu references -i baseline systems --paired-bs -m bleu chrf` and `--paired-ar`, with a fixed seed.

    Args:
        baseline: Its translations, one per item.
        systems: Translations of each system by name.
        references: One per item.

    Example:
        >>> text = ["a small dog runs over the grass", "two birds sing in a tree", "it rains on the old town"] * 4
        >>> worse = [line.replace("a", "the") for line in text]
        >>> tests, signatures = compute_p_values(worse, {"same": text}, text)
        >>> tests["same"][0].metric, tests["same"][0].score > tests["same"][0].baseline
        ('BLEU', True)
        >>> signatures["BLEU, paired bootstrap"].split("|")[1:3]
        ['bs:1000', 'seed:12345']
    """
    # slow to import, and not needed for other tasks
    import sacrebleu
    from sacrebleu.significance import PairedTest

    found: dict[str, list[list[Any]]] = {}
    signatures: dict[str, str] = {}
    for kind, name, samples in (("bs", "paired bootstrap", RESAMPLES), ("ar", "approximate randomisation", TRIALS)):
        named = [("baseline", baseline), *systems.items()]
        # texts of some tasks are tokenized already, which sacreBLEU would remark on
        scorers = {"BLEU": sacrebleu.BLEU(force=True), "chrF": sacrebleu.CHRF()}
        with _fixed_seed():
            test = PairedTest(named, scorers, [references], test_type=kind, n_samples=samples)
            signed, scores = test()
        # sacreBLEU names the second by its beta, in the order in which they were given
        found[kind] = [scores[key] for key in signed]
        signatures |= {f"{metric}, {name}": str(signed[key]) for metric, key in zip(METRICS, signed, strict=True)}
    tests = {
        system: tuple(
            SystemTest(metric, *map(float, (bs[place].score, bs[0].score, bs[place].p_value, ar[place].p_value)))
            for metric, bs, ar in zip(METRICS, found["bs"], found["ar"], strict=True)
        )
        for place, system in enumerate(systems, start=1)
    }
    return tests, signatures


def run_paired_tests(pairs: Sequence[Pair], references: Path, kept: Path) -> Iterator[int]:
    """Test every pair whose result is not stored yet and store it; yields the number of pairs done.

    Args:
        pairs: The pairs.
        references: File of references, one line per test item.
        kept: File of results, rewritten after each control.

    Raises:
        DataError: A file is missing or has another number of lines than the references.
    """
    known = _read_tests(kept)
    keys = {pair: _make_key(pair, references) for pair in pairs}
    left = [pair for pair in pairs if keys[pair] not in known["tests"]]
    done = len(pairs) - len(left)
    yield done
    expected = _read_lines(references) if left else []
    left.sort(key=_group_key)
    for _, members in groupby(left, _group_key):
        group = list(members)
        baseline = _read_lines(group[0].baseline, len(expected))
        systems = {pair.arm: _read_lines(pair.system, len(expected)) for pair in group}
        tests, signatures = compute_p_values(baseline, systems, expected)
        known["signatures"] |= signatures
        known["tests"] |= {keys[pair]: [vars(test) for test in tests[pair.arm]] for pair in group}
        # drop results of texts that no longer exist
        known["tests"] = {key: value for key, value in known["tests"].items() if key in keys.values()}
        write_json(kept, known)
        done += len(group)
        yield done


def read_paired_tests(
    pairs: Sequence[Pair], references: Path, kept: Path
) -> tuple[tuple[PairedTests, ...], dict[str, str]]:
    """Return the stored results of the pairs by arm and metric, and the signatures of the tests.

    Raises:
        DataError: `kept` is damaged.
    """
    if not kept.exists() or not references.exists():
        return (), {}
    known = _read_tests(kept)
    found: dict[tuple[str, str, str], dict[int, SystemTest]] = {}
    for pair in pairs:
        for test in known["tests"].get(_make_key(pair, references), ()):
            tests = found.setdefault((pair.arm, pair.against, test["metric"]), {})
            tests[pair.seed] = SystemTest(**test)
    summed = [PairedTests(*names, tuple(sorted(s)), tuple(s[seed] for seed in sorted(s))) for names, s in found.items()]
    summed.sort(key=lambda tests: METRICS.index(tests.metric))
    return tuple(summed), known["signatures"] if summed else {}


def _read_tests(kept: Path) -> dict[str, Any]:
    if not kept.exists():
        return {"signatures": {}, "tests": {}}
    known = read_json(kept)
    try:
        tests = {str(key): [vars(SystemTest(**test)) for test in value] for key, value in known["tests"].items()}
        for metric in (test["metric"] for several in tests.values() for test in several):
            METRICS.index(metric)
        return {"signatures": {str(key): str(value) for key, value in known["signatures"].items()}, "tests": tests}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"{kept} does not hold paired tests; delete it and run the same command again.") from None


def _make_key(pair: Pair, references: Path) -> str:
    import sacrebleu

    done = f"{sacrebleu.__version__} {METRICS} {SEED} {RESAMPLES} {TRIALS}"
    for path in (pair.baseline, pair.system):
        if not path.exists():
            raise DataError(f"{path} does not exist; {_say_how_to_redo(path)}")
    return digest(done, (references, pair.baseline, pair.system))


def _group_key(pair: Pair) -> tuple[str, int]:
    return pair.against, pair.seed


def _read_lines(path: Path, expected: int | None = None) -> list[str]:
    lines = [line for _, line in read_numbered_lines(path)]
    if expected is not None and len(lines) != expected:
        raise DataError(f"{path} has {len(lines)} lines, its references {expected}; {_say_how_to_redo(path)}")
    return lines


def _say_how_to_redo(path: Path) -> str:
    return f"delete the folder {path.parent} and run the same command again, which redoes only this run."


@contextmanager
def _fixed_seed() -> Iterator[None]:
    # sacreBLEU takes a seed from the environment only
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(SEED)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
