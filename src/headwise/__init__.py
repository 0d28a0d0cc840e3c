"""headwise: diverse multi-head attention for PyTorch, in your own model and training loop.

The names are in `headwise.api`; they and torch are loaded when the first is used, so that a command's help need not
wait for them.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise.errors import warn_renamed

__version__ = "0.2.0.dev0"

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
