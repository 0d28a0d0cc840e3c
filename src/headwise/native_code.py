"""Panics of native code: exceptions that are no `Exception`, which a file that others made can bring about."""

from collections.abc import Iterator
from contextlib import contextmanager

from headwise.errors import DataError


@contextmanager
def refuse_panics(what: str, remedy: str) -> Iterator[None]:
    """Turn a panic in the block into a sentence.

    Args:
        what: What cannot be done, as the begin of the sentence.
        remedy: What to do, as its end.

    Raises:
        DataError: Native code of the block panicked; every other exception stays as it is.
    """
    try:
        yield
    except BaseException as error:
        # the name that pyo3 gives it, of which there is no class to import
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({' '.join(str(error).split())[:200]}); {remedy}") from None
