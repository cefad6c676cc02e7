"""Writes docs/configuration.md and docs/metrics.md from the schema and the glossary: `python docs/generate.py`.

`tests/test_docs.py` fails when a file is not what this writes.
"""

from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dflash_ddp import config as schema
from dflash_ddp import glossary
from dflash_ddp.plan import compose_tree
from dflash_ddp.train import CONF_DIR
from dflash_ddp.usage import fields_of, value_text

DOCS = Path(__file__).resolve().parent
_NOTE = "<!-- Written by docs/generate.py; change the source that it names, not this file. -->\n\n"


def type_text(annotation: str) -> str:
    """A type for people: the members of an enum, else as written."""
    kind = getattr(schema, annotation, None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " \\| ".join(member.value for member in kind)
    return annotation.replace("None", "null").replace("|", "\\|")


def configuration() -> str:
    """docs/configuration.md."""
    defaults: Any = OmegaConf.to_container(compose_tree([]))  # what follows another setting says so
    parts = [
        "# Every setting\n\n",
        _NOTE,
        "From `src/dflash_ddp/config.py`; a value that breaks a rule is refused with key, value and rule. *Default* is "
        "that of\n`python -m dflash_ddp.train` without arguments; `${key}` follows that key. A group's files in "
        "`conf/` are chosen by name\n(`drafter=like_target`), single settings by dotted key (`drafter.block_size=8`); "
        "the latter win. What a command would run:\n`--cfg job`.\n",
    ]
    groups = [(name, kind) for name, kind, _ in fields_of(schema.Config) if kind.endswith("Config")]
    for group, kind in [("", "Config"), *groups]:
        rows = [f for f in fields_of(getattr(schema, kind)) if not f[1].endswith("Config")]
        values = defaults[group] if group else defaults
        doc = (getattr(schema, kind).__doc__ or "").strip()
        files = sorted(f.stem for f in (CONF_DIR / group).glob("*.yaml")) if group else []
        named = f" Files: {', '.join(f'`{group}={f}`' for f in files)}." if files else ""
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        parts.append(f"\n## {group or 'The run'}\n\n{doc}{named}\n\n{head}")
        for name, annotation, text in rows:
            key = f"{group}.{name}" if group else name
            meaning = text.replace("|", "\\|")
            parts.append(
                f"| `{key}` | {type_text(annotation)} | `{value_text(values[name])}` | {meaning} |\n"
            )
    for group in ("experiment", "sweep"):
        files = sorted((CONF_DIR / group).glob("*.yaml"))
        parts.append(
            f"\n## {group}\n\nWhole runs: {', '.join(f'`{group}={f.stem}`' for f in files)}.\n"
        )
    return "".join(parts)


METRICS_HEAD = """# Every number that a run logs

{note}From `src/dflash_ddp/glossary.py`. The same keys stand in `metrics.jsonl`, in wandb (a section for each group, the
step as axis) and in `report.html`. Numbers are means or sums since the row before. `k` is a slot of the block, 1 to
B - 1, or a number of tokens.

"""


def metrics() -> str:
    """docs/metrics.md."""
    end = (DOCS / "panels.md").read_text(encoding="utf-8").partition("\n")[2]
    return METRICS_HEAD.format(note=_NOTE) + glossary.markdown() + end


FILES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for file, text in FILES.items():
        (DOCS / file).write_text(text(), encoding="utf-8")
