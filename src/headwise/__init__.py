"""headwise: diverse multi-head attention for PyTorch, in your own model and training loop.

The names are in `headwise.api`; they and torch are loaded when the first is used, so that a command's help need not
wait for them.

Where transformers is used too, before or after, its Auto classes open the folders of `headwise.save`.
"""

import gc
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise.errors import warn_renamed

__version__ = "0.3.0"

if TYPE_CHECKING:
    # type checkers read the names of `api`, which are imported one by one below
    from headwise.api import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        collecting = gc.isenabled()
        # a full collection passes over all objects of torch, and would take longer than the import
        gc.disable()
        try:
            api = import_module("headwise.api")
        finally:
            if collecting:
                gc.enable()
        # from here on they are found without this function
        globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
        if name in api.MOVED:
            space = api.MOVED[name]
            warn_renamed(f"headwise.{name}", f"headwise.{space.__name__.rpartition('.')[2]}.{name}")
            return getattr(space, name)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("headwise.api").__all__})


_AUTO = "transformers.models.auto.configuration_auto"


class _OnceImported:
    """Registers saved folders in transformers when it has imported its Auto classes: Python asks `sys.meta_path`."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AUTO:
            return None
        others = [finder for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register()

            vars(spec.loader)["exec_module"] = run_and_register
        return spec


def _register() -> None:
    # a version of transformers that headwise does not know is left alone
    with suppress(ImportError):
        import_module("headwise.integrations.auto").register()


if _AUTO in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _OnceImported)
