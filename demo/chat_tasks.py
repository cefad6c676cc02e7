"""Chat rows made of library source: three tasks with a checkable, regular answer.

In:  `Definition` values (stdlib_text.py).
Out: `Exchange` values (question, reference answer). Tasks: *continue* the code, *describe* a
     function as a list read off its syntax tree, *docstring* for a function that lost its own.
     A conversation is one exchange, or two about the same definition.
Invariant: the choice of tasks and of the place where code is cut depends only on the definition and
the seed. Reference answers teach the target; the rows of the demo carry the target's own answers.
"""

import ast
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from stdlib_text import Definition

MIN_ANSWER_CHARS = 90
MAX_ANSWER_CHARS = 520
MAX_LISTED = 6
TWO_TURN_SHARE = 0.12


@dataclass(frozen=True)
class Exchange:
    """One user turn and the answer that the source itself gives."""

    task: str
    question: str
    answer: str


def row_random(definition: Definition, seed: int) -> random.Random:
    """Random source of one definition: independent of the order in which rows are made."""
    key = f"{seed}/{definition.module}/{definition.path}/{definition.code}"
    return random.Random(zlib.crc32(key.encode()))


def conversations(definition: Definition, *, seed: int) -> Iterator[list[Exchange]]:
    """Yield the conversations about one definition: single turns, sometimes one of two turns."""
    rng = row_random(definition, seed)
    made = [
        continue_task(definition, rng),
        describe_task(definition),
        docstring_task(definition),
    ]
    exchanges = [exchange for exchange in made if exchange is not None]
    for exchange in exchanges:
        yield [exchange]
    if exchanges and rng.random() < TWO_TURN_SHARE * len(exchanges):
        second = follow_up_task(definition)
        firsts = [exchange for exchange in exchanges if exchange.task != "describe"]
        if second is not None and firsts:
            yield [rng.choice(firsts), second]


def continue_task(definition: Definition, rng: random.Random) -> Exchange | None:
    """Show the first lines of a definition; the answer is the rest of it."""
    lines = definition.code.splitlines()
    cut = rng.randint(max(1, len(lines) // 4), max(1, (2 * len(lines)) // 3))
    head, rest = "\n".join(lines[:cut]), "\n".join(lines[cut:])
    if not MIN_ANSWER_CHARS <= len(rest) <= MAX_ANSWER_CHARS:
        return None
    where = f"`{definition.module}`"
    return Exchange("continue", f"Continue this code from {where}:\n{_fence(head)}", _fence(rest))


def docstring_task(definition: Definition) -> Exchange | None:
    """Show a definition without its docstring; the answer is the docstring."""
    text = definition.docstring
    if not MIN_ANSWER_CHARS <= len(text) <= MAX_ANSWER_CHARS or '"""' in text:
        return None
    return Exchange(
        "docstring",
        f"Write the docstring of `{definition.path}` from `{definition.module}`:\n"
        f"{_fence(definition.code_without_docstring)}",
        _fence(f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'),
    )


def describe_task(definition: Definition) -> Exchange | None:
    """Show a definition; the answer lists its arguments, calls, errors and result."""
    answer = description(definition)
    if answer is None:
        return None
    return Exchange(
        "describe",
        f"Describe `{definition.path}` from `{definition.module}`:\n"
        f"{_fence(definition.code_without_docstring)}",
        answer,
    )


def follow_up_task(definition: Definition) -> Exchange | None:
    """Second turn after *continue* or *docstring*: describe what was talked about."""
    answer = description(definition)
    if answer is None:
        return None
    return Exchange("describe", f"Now describe `{definition.path}`.", answer)


def description(definition: Definition) -> str | None:
    """List the arguments, calls, errors and result of a definition; None if too long or short."""
    node = ast.parse(definition.code).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    kind = f"a method of `{definition.owner}`" if definition.owner else "a function"
    parts = [f"`{definition.name}` is {kind} in the module `{definition.module}`."]
    parts.append(_listed("It takes", "argument", _arguments(node)))
    parts.append(_listed("It calls", "function", _called(node)))
    raised = _raised(node)
    if raised:
        parts.append(_listed("It raises", "error", raised))
    parts.append(_result(node))
    text = "\n\n".join(parts)
    return text if MIN_ANSWER_CHARS <= len(text) <= MAX_ANSWER_CHARS else None


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _listed(verb: str, noun: str, items: list[str]) -> str:
    """Sentence and list, such as `It takes 2 arguments:` and two lines."""
    if not items:
        return f"{verb} no {noun}s."
    plural = noun if len(items) == 1 else f"{noun}s"
    return "\n".join([f"{verb} {len(items)} {plural}:", *(f"- {item}" for item in items)])


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Arguments in the order of the signature, each with its default if it has one."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    missing = len(positional) - len(spec.defaults)
    defaults: list[ast.expr | None] = [*([None] * missing), *spec.defaults]
    items = [_argument(arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if spec.vararg:
        items.append(f"`*{spec.vararg.arg}`")
    items += [
        _argument(arg, default)
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    if spec.kwarg:
        items.append(f"`**{spec.kwarg.arg}`")
    return items


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return f"`{arg.arg}`" if default is None else f"`{arg.arg}`, default `{ast.unparse(default)}`"


def _called(node: ast.AST) -> list[str]:
    """Names of called functions in source order, each once, at most MAX_LISTED."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = [
        ast.unparse(call.func) for call in calls if isinstance(call.func, (ast.Name, ast.Attribute))
    ]
    return [f"`{name}`" for name in dict.fromkeys(names) if len(name) <= 40][:MAX_LISTED]


def _raised(node: ast.AST) -> list[str]:
    """Names of raised errors, sorted by name, each once."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            error = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            if isinstance(error, (ast.Name, ast.Attribute)):
                names.add(ast.unparse(error))
    return [f"`{name}`" for name in sorted(names)][:MAX_LISTED]


def _result(node: ast.AST) -> str:
    """Sentence about the last `return` with a value, or its absence."""
    values = [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Return) and inner.value is not None
    ]
    if not values:
        return "It returns nothing."
    last = max(values, key=lambda inner: inner.lineno)
    assert last.value is not None
    text = ast.unparse(last.value)
    return f"It returns `{text}`." if len(text) <= 60 else "It returns a value."
