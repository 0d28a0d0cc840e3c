"""The plan of the house as data: which file stands on which floor, in which order."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headwise"

# A file imports from floors below its own, and from files above it in the list of its own floor. Paths are relative
# to src/headwise; a folder's files may stand on any floor.
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("F0 checks", ("checks.py",)),
    (
        "F1 tensors",
        (
            "gram.py",
            "bandwidths.py",
            "kernels.py",
            "mixing.py",
            "cosine_rules.py",
            "particles.py",
            "disagreement.py",
            "metrics.py",
            "votes.py",
            "simple_routing.py",
            "em_routing.py",
            "routing.py",
            "recompute.py",
            "reference/__init__.py",
            "reference/particles.py",
            "reference/disagreement.py",
            "reference/metrics.py",
            "reference/routing.py",
        ),
    ),
    (
        "F2 models",
        (
            "hooks.py",
            "scores.py",
            "recomputation.py",
            "nn.py",
            "padding.py",
            "heads.py",
            "projections.py",
            "places.py",
            "sites.py",
            "rows.py",
            "fused.py",
            "layouts.py",
            "captures.py",
            "taps.py",
            "head_bias.py",
            "replay.py",
            "experiments.py",
            "verify.py",
        ),
    ),
    (
        "F3 methods",
        (
            "ensembles.py",
            "attachments.py",
            "repulsion.py",
            "penalty.py",
            "aggregators.py",
            "setting_records.py",
            "tensor_files.py",
            "saving.py",
            "aggregation.py",
            "ablation.py",
        ),
    ),
    ("F4 reports", ("page.py", "testing.py")),
    ("bridges", ("bridges/__init__.py", "bridges/huggingface.py")),
    ("public names", ("__init__.py",)),
    (
        "laboratory",
        (
            "lab/__init__.py",
            "lab/versions.py",
            "lab/statistics.py",
            "lab/data.py",
            "lab/runs.py",
            "lab/metric.py",
            "lab/tasks/__init__.py",
            "lab/tasks/task.py",
            "lab/tasks/logic_formulas.py",
            "lab/tasks/logic_files.py",
            "lab/tasks/logic_generator.py",
            "lab/tasks/logic_scales.py",
            "lab/tasks/logic_data.py",
            "lab/downloads.py",
            "lab/tasks/translation_cleaning.py",
            "lab/tasks/translation_files.py",
            "lab/tasks/translation_recipes.py",
            "lab/tasks/translation_corpora.py",
            "lab/tasks/translation_own.py",
            "lab/tasks/subwords.py",
            "lab/tasks/translation_arrays.py",
            "lab/tasks/translation_preparation.py",
            "lab/tasks/translation_data.py",
            "lab/tasks/translation_scales.py",
            "lab/models/__init__.py",
            "lab/models/encoder.py",
            "lab/models/pair.py",
            "lab/models/cached_attention.py",
            "lab/models/seq2seq.py",
            "lab/models/marian.py",
            "lab/models/baselines.py",
            "lab/protocol.py",
            "lab/arms.py",
            "lab/arm_text.py",
            "lab/paired_tests.py",
            "lab/head_drops.py",
            "lab/results.py",
            "lab/evidence.py",
            "lab/settings.py",
            "lab/drophead.py",
            "lab/methods.py",
            "lab/batches.py",
            "lab/token_batches.py",
            "lab/evaluation.py",
            "lab/tasks/logic.py",
            "lab/tasks/translation_loss.py",
            "lab/tasks/translation_decoding.py",
            "lab/tasks/translation.py",
            "lab/tasks/named.py",
            "lab/checkpoints.py",
            "lab/workers.py",
            "lab/averaging.py",
            "lab/callback.py",
            "lab/baseline.py",
            "lab/train.py",
            "lab/trained.py",
            "lab/redundancy.py",
            "lab/head_vectors.py",
            "lab/analyses.py",
            "lab/jobs.py",
            "lab/progress.py",
            "lab/table.py",
            "lab/table_record.py",
            "lab/cells.py",
            "lab/grids.py",
            "lab/labels.py",
            "lab/drawing.py",
            "lab/figures.py",
            "lab/report.py",
            "lab/compare.py",
            "lab/tune.py",
            "lab/shown.py",
            "lab/claims.py",
            "lab/tables/__init__.py",
            "lab/tables/sizes.py",
            "lab/tables/data_names.py",
            "lab/tables/reproduction.py",
            "lab/tables/pictures.py",
            "lab/tables/records.py",
            "lab/tables/repulsive.py",
            "lab/tables/diversify_ablations.py",
            "lab/tables/diversify.py",
            "lab/reproduce.py",
            "lab/reproduction_lists.py",
            "lab/encoder_masks.py",
            "lab/translator.py",
            "lab/translate.py",
            "lab/arguments.py",
            "lab/translation_commands.py",
            "lab/cli.py",
        ),
    ),
)

# Files above this many lines need a reason to be one file.
LONGEST = 300
LONG: dict[str, str] = {
    "disagreement.py": "five terms and their sums over tokens, each a few lines under its equation",
    "ensembles.py": "the two passes of a step read as one text",
    "heads.py": "Slab, Site and Heads are one idea; half of it is docstrings",
    "metrics.py": "eight measures, each a few lines under its equation",
    "lab/models/seq2seq.py": "one model, read from its configuration to its cache",
    "lab/table.py": "rows and verdicts of one table; half of it is docstrings",
}


def position(path: str) -> tuple[int, int] | None:
    """The floor of a file and its place there; None when the plan does not have it."""
    for floor, (_, files) in enumerate(FLOORS):
        if path in files:
            return floor, files.index(path)
    return None


def source_files() -> list[str]:
    """All source files, relative to src/headwise."""
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def module_name(path: str) -> str:
    """The dotted name of a source file."""
    parts = ["headwise", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
