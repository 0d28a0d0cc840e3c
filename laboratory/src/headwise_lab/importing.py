"""Importing torch and transformers without collecting garbage in between."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Keep Python's garbage collector from the imports of the block, and from what they made afterwards.

    They make hundreds of thousands of objects that stay. Walking over them again and again while the rest is imported
    finds nothing and takes time, as does each full collection later; the Trainer begins with one.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    # a job done before has left some, which would stay as well
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        # where nothing was imported, what lies there may be garbage
        if len(sys.modules) > before:
            gc.freeze()
            # triton's bindings report what is still frozen at the end as leaks
            atexit.register(gc.unfreeze)
        if enabled:
            gc.enable()
