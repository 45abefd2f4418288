"""An extension of Griffe, by which MkDocs reads docstrings and signatures as they are meant."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Shows an example as code, and a setting's default and help instead of the call that has them."""

    def on_instance(self, *, obj: griffe.Object, **rest: Any) -> None:
        if obj.docstring:  # Griffe knows the section by its plural only
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **rest: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) in ("setting", "option"):
            keywords = {a.name: a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword)}
            positional = [a for a in value.arguments if not isinstance(a, griffe.ExprKeyword)]
            attr.value = positional[0] if positional else keywords["make"]
            words = positional[1] if len(positional) > 1 else keywords["help"]
            attr.docstring = griffe.Docstring(ast.literal_eval(str(words)), parent=attr)
