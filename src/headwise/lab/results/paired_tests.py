"""sacreBLEU's own paired tests of one translation system against another: an arm's run against its control's, by seed.

Owns which texts are tested, the fixed seed of the draws, and the file in which the answers are kept. The tests
themselves are sacreBLEU's. Must not know arms or tables.
"""

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
from headwise.lab.data.arrays import digest, numbered_lines
from headwise.lab.experiment.run_folder import read_json, write_json

# sacreBLEU's own defaults, named so that an environment variable or a later version changes nothing unseen.
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
        system: File of the arm's translations, a line a test item.
        baseline: File of the control's.
    """

    arm: str
    against: str
    seed: int
    system: Path
    baseline: Path


@dataclass(frozen=True)
class SystemTest:
    """What sacreBLEU's tests say of one system against another.

    Attributes:
        metric: "BLEU" or "chrF".
        score: The system's score, 0 to 100.
        baseline: The other's.
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
    """The tests of one arm against its control on one metric, a seed each; p-values of seeds are never pooled.

    Attributes:
        arm: Name of the arm.
        against: Name of its control.
        metric: "BLEU" or "chrF".
        seeds: The seeds that both have.
        tests: One test a seed.
    """

    arm: str
    against: str
    metric: str
    seeds: tuple[int, ...]
    tests: tuple[SystemTest, ...]

    def among(self, seeds: Sequence[int]) -> PairedTests:
        """Return the tests of these seeds alone."""
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


def paired_p_values(
    baseline: Sequence[str], systems: Mapping[str, Sequence[str]], references: Sequence[str]
) -> tuple[dict[str, tuple[SystemTest, ...]], dict[str, str]]:
    """Return each system's tests against the baseline, and the signatures by what was done.

    What `sacrebleu references -i baseline systems --paired-bs -m bleu chrf` and `--paired-ar` compute, at a seed that
    the environment does not change.

    Args:
        baseline: Its translations, one an item.
        systems: The others' by name.
        references: One an item.

    Example:
        >>> text = ["a small dog runs over the grass", "two birds sing in a tree", "it rains on the old town"] * 4
        >>> worse = [line.replace("a", "the") for line in text]
        >>> tests, signatures = paired_p_values(worse, {"same": text}, text)
        >>> tests["same"][0].metric, tests["same"][0].score > tests["same"][0].baseline
        ('BLEU', True)
        >>> signatures["BLEU, paired bootstrap"].split("|")[1:3]
        ['bs:1000', 'seed:12345']
    """
    # sacreBLEU takes a while to import, and a table of another task does without it
    import sacrebleu
    from sacrebleu.significance import PairedTest

    found: dict[str, list[list[Any]]] = {}
    signatures: dict[str, str] = {}
    for kind, name, samples in (("bs", "paired bootstrap", RESAMPLES), ("ar", "approximate randomisation", TRIALS)):
        named = [("baseline", baseline), *systems.items()]
        # texts of some tasks are tokenised already, which sacreBLEU would remark on
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


def do_paired_tests(pairs: Sequence[Pair], references: Path, kept: Path) -> Iterator[int]:
    """Test every pair that `kept` does not know in its present form, and keep what was found; yields how many are done.

    Args:
        pairs: The pairs.
        references: File of references, a line a test item.
        kept: The file; written whole after each control.

    Raises:
        DataError: A file is missing or has another number of lines than the references.
    """
    known = _read(kept)
    keys = {pair: _key(pair, references) for pair in pairs}
    left = [pair for pair in pairs if keys[pair] not in known["tests"]]
    done = len(pairs) - len(left)
    yield done
    expected = _lines(references) if left else []
    left.sort(key=_group)
    for _, members in groupby(left, _group):
        group = list(members)
        baseline = _lines(group[0].baseline, len(expected))
        systems = {pair.arm: _lines(pair.system, len(expected)) for pair in group}
        tests, signatures = paired_p_values(baseline, systems, expected)
        known["signatures"] |= signatures
        known["tests"] |= {keys[pair]: [vars(test) for test in tests[pair.arm]] for pair in group}
        # what belongs to texts that are gone is not kept
        known["tests"] = {key: value for key, value in known["tests"].items() if key in keys.values()}
        write_json(kept, known)
        done += len(group)
        yield done


def read_paired_tests(
    pairs: Sequence[Pair], references: Path, kept: Path
) -> tuple[tuple[PairedTests, ...], dict[str, str]]:
    """Return what `kept` knows of the pairs as they lie on disk, by arm and metric, and the tests' signatures.

    Raises:
        DataError: `kept` is damaged.
    """
    if not kept.exists() or not references.exists():
        return (), {}
    known = _read(kept)
    found: dict[tuple[str, str, str], dict[int, SystemTest]] = {}
    for pair in pairs:
        for test in known["tests"].get(_key(pair, references), ()):
            tests = found.setdefault((pair.arm, pair.against, test["metric"]), {})
            tests[pair.seed] = SystemTest(**test)
    summed = [PairedTests(*names, tuple(sorted(s)), tuple(s[seed] for seed in sorted(s))) for names, s in found.items()]
    summed.sort(key=lambda tests: METRICS.index(tests.metric))
    return tuple(summed), known["signatures"] if summed else {}


def _read(kept: Path) -> dict[str, Any]:
    if not kept.exists():
        return {"signatures": {}, "tests": {}}
    known = read_json(kept)
    try:
        tests = {str(key): [vars(SystemTest(**test)) for test in value] for key, value in known["tests"].items()}
        return {"signatures": {str(key): str(value) for key, value in known["signatures"].items()}, "tests": tests}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"{kept} does not hold paired tests; delete it and give the same command again.") from None


def _key(pair: Pair, references: Path) -> str:
    import sacrebleu

    done = f"{sacrebleu.__version__} {METRICS} {SEED} {RESAMPLES} {TRIALS}"
    for path in (pair.baseline, pair.system):
        if not path.exists():
            raise DataError(f"{path} does not exist; {_again(path)}")
    return digest(done, (references, pair.baseline, pair.system))


def _group(pair: Pair) -> tuple[str, int]:
    return pair.against, pair.seed


def _lines(path: Path, expected: int | None = None) -> list[str]:
    lines = [line for _, line in numbered_lines(path)]
    if expected is not None and len(lines) != expected:
        raise DataError(f"{path} has {len(lines)} lines, its references {expected}; {_again(path)}")
    return lines


def _again(path: Path) -> str:
    return f"delete the folder {path.parent} and give the same command again, which redoes this run alone."


@contextmanager
def _fixed_seed() -> Iterator[None]:
    # the environment is the only place sacreBLEU takes a seed from
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(SEED)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
