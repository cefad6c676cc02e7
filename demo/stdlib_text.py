"""Source of Python's standard library, split by file into training text and held-out text.

In:  the folder of the running interpreter's standard library (PSF licence).
Out: `SourceFile` values in the order of their module names; `Definition` values, one for each
     function or method short enough for a chat row, with its code dedented.
Invariant: a file is held out by a checksum of its module name alone, so the split does not depend
on the machine, the seed or the other files, and no file is on both sides.
"""

import ast
import logging
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Tests and installed packages are not the library; the other two are tables, not code.
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
    "lib-dynload", "encodings", "pydoc_data",
}  # fmt: skip
HELDOUT_ONE_IN = 12
MAX_DEFINITION_CHARS = 1100
MIN_DEFINITION_LINES = 3


@dataclass(frozen=True)
class SourceFile:
    """One file of the library: dotted module name, text, and the side of the split."""

    module: str
    text: str
    heldout: bool


@dataclass(frozen=True)
class Definition:
    """One function or method: where it stands, its dedented code, and that code without docstring.

    `owner` is the class name, or empty for a function of the module.
    """

    module: str
    owner: str
    name: str
    code: str
    code_without_docstring: str
    docstring: str
    heldout: bool

    @property
    def path(self) -> str:
        """Name as the chat prompts say it: `Class.method` or `function`."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


def is_heldout(module: str) -> bool:
    """Whether all text of this module is kept from the target and from the training rows."""
    return zlib.crc32(module.encode()) % HELDOUT_ONE_IN == 0


def module_name(path: Path) -> str:
    """Dotted name of a file given relative to the library folder."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def collect_files(*, max_files: int | None = None) -> list[SourceFile]:
    """Read the library's files, sorted by module; `max_files` keeps an even sample of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        generated = relative.name.startswith("_sysconfigdata") or relative.parts[0].startswith(
            "config-"
        )
        if generated or SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        module = module_name(relative)
        if module and text.strip():
            files.append(SourceFile(module, text, is_heldout(module)))
    if not files:
        raise ValueError(f"stdlib={root}: no Python source found; use an interpreter that ships it")
    if max_files is not None:
        files = files[:: max(1, len(files) // max_files)]
    log.info(
        "collected %d files, %.2f MB; %d files held out",
        len(files), sum(len(f.text) for f in files) / 1e6, sum(f.heldout for f in files),
    )  # fmt: skip
    return files


def definitions(file: SourceFile) -> Iterator[Definition]:
    """Yield the functions and methods of a file that fit a chat row, in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files hold invalid escapes, which only warn
        try:
            tree = ast.parse(file.text)
        except SyntaxError:
            log.info("skipped %s: not parsable", file.module)
            return
    lines = file.text.splitlines()
    owners = {
        id(child): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        found = _definition(file, node, lines=lines, owner=owners.get(id(node), ""))
        if found is not None:
            yield found


def _definition(
    file: SourceFile,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    *,
    lines: list[str],
    owner: str,
) -> Definition | None:
    """Cut one definition out of its file; None if it is too long, too short or only a docstring."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    own = lines[first:last]
    code = _tidy(own)
    docstring = ast.get_docstring(node) or ""
    bare = code
    if docstring:
        head = node.body[0]
        kept = own[: head.lineno - 1 - first] + own[(head.end_lineno or head.lineno) - first :]
        bare = _tidy(kept)
        if len(node.body) == 1 or head.lineno - 1 == first:
            return None
    if len(code) > MAX_DEFINITION_CHARS or len(bare.splitlines()) < MIN_DEFINITION_LINES:
        return None
    if not (_parses(code) and _parses(bare)):
        return None  # comments or strings that start left of the code stop the dedent
    return Definition(file.module, owner, node.name, code, bare, docstring, file.heldout)


def _parses(code: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except SyntaxError:
            return False
    return True


def _tidy(lines: list[str]) -> str:
    """Dedent, turn tabs into spaces, and drop blank and trailing white space."""
    text = textwrap.dedent("\n".join(line.expandtabs(4).rstrip() for line in lines))
    return "\n".join(line for line in text.splitlines() if line)
