"""Has the site read the section "Example:" of a docstring as code, as it reads "Examples:"."""

import re
from typing import Any

from griffe import Extension, Object


class ReadExamples(Extension):
    """Renames the section."""

    def on_instance(self, *, obj: Object, **_others: Any) -> None:
        """Rename it in the docstring of an object, if it has one."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
