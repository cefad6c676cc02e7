"""What a small command does and which keys it takes, from its docstrings: for `--help` and for the docs."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from typing import Any


def fields_of(schema: type[Any]) -> list[tuple[str, str, str]]:
    """(name, type, docstring) of a dataclass's fields, in order."""
    (node,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(node, ast.ClassDef)
    found = []
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            found.append((ast.unparse(field.target), ast.unparse(field.annotation), text))
    return found


def value_text(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list):
        return ",".join(map(value_text, value))
    written = {None: "null", True: "true", False: "false"}
    return written[value] if value is None or isinstance(value, bool) else str(value)


def keys(schema: type[Any]) -> Iterator[str]:
    """`key=default` and its meaning, two lines each."""
    defaults = asdict(schema())
    for name, _, text in fields_of(schema):
        yield f"  {name}={value_text(defaults[name])}\n      {text}"


def usage(schema: type[Any]) -> str:
    """The docstring of a command's module, and its keys."""
    about = (sys.modules[schema.__module__].__doc__ or "").strip()
    return f"{about}\n\nKeys, key=default:\n" + "\n".join(keys(schema)) + "\n"
