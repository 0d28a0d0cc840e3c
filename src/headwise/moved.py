"""Module paths of version 0.1 that were documented and have moved: they still import, with a DeprecationWarning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "headwise.kernels": "headwise.repulsion",
    "headwise.particles": "headwise.repulsion",
    "headwise.cosine_rules": "headwise.repulsion",
    "headwise.mean_weights": "headwise.nn",
    # named by pickled models
    "headwise.hooks": "headwise.nn.hooks",
    "headwise.scores": "headwise.nn.scores",
    "headwise.votes": "headwise.routing",
    "headwise.aggregators": "headwise.routing",
    "headwise.gates": "headwise.routing",
    "headwise.flex_masks": "headwise.masks",
    "headwise.calibration": "headwise.metrics",
    "headwise.bridges": "headwise.roles",
    "headwise.bridges.spacy": "headwise.roles.spacy",
    "headwise.lab.arms": "headwise.lab.experiment.arm",
    "headwise.lab.arm_text": "headwise.lab.experiment.arm_text",
    "headwise.lab.guided": "headwise.lab.experiment.arm",
    "headwise.lab.encoder_masks": "headwise.lab.role_masks.encoder",
    "headwise.lab.statistics": "headwise.lab.results.statistics",
    "headwise.lab.probing_fit": "headwise.lab.probing.fit",
    "headwise.lab.claims": "headwise.lab.papers.claims",
    "headwise.lab.tables": "headwise.lab.papers",
    "headwise.lab.tables.reproduction": "headwise.lab.papers.reproduction",
    "headwise.lab.tables.sizes": "headwise.lab.papers.reproduction",
    "headwise.lab.tasks.translation_scales": "headwise.lab.tasks.translation.scales",
    "headwise.lab.models.graph_encoder": "headwise.lab.tasks.graph2text.model",
    "headwise.lab.models.seq2seq": "headwise.lab.tasks.translation.model",
}


class MovedModules(MetaPathFinder, Loader):
    """Imports a moved module under its old path."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  part of the protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec for an old path, None for any other module."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module with the names of the new one."""
        old = module.__name__
        warnings.warn(f"{old} is now {MOVED[old]}; import from there.", DeprecationWarning, stacklevel=2)
        new = importlib.import_module(MOVED[old])
        vars(module).update({name: value for name, value in vars(new).items() if not name.startswith("__")})


def install() -> None:
    """Make the old paths importable; a second call does nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
