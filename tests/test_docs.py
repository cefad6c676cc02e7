"""Docs say what is: generated files are up to date, links lead somewhere, commands would run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dflash_ddp.bench.options import split_settings
from dflash_ddp.plan import PlanOptions, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name):
    """If not: python docs/generate.py."""
    assert (ROOT / "docs" / name).read_text() == generator().FILES[name]()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    here = [link for link in links if not link.startswith("http")]
    assert [link for link in here if not (page.parent / link).exists()] == []


def commands(page: Path) -> list[list[str]]:
    """Words of every command of ours in a page: in blocks, and between backquotes."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:python -m dflash_ddp|launch/)[^`\n]*)`", text)
    return [shlex.split(line, comments=True) for line in lines if "dflash_ddp." in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_programs_and_settings_that_exist(page):
    for words in commands(page):
        (program,) = (word for word in words if word.startswith("dflash_ddp."))
        assert importlib.util.find_spec(program) is not None, program
        if program not in ("dflash_ddp.train", "dflash_ddp.plan"):
            continue
        pairs = [w for w in words[words.index(program) + 1 :] if "=" in w and "<" not in w]
        if program.endswith("plan"):
            _, pairs = split_settings(PlanOptions, pairs)
        swept = "--multirun" in words
        settings = [word.split(",")[0] if swept else word for word in pairs]
        load_config([word for word in settings if not word.startswith("hydra")])


def test_a_default_that_follows_another_setting_says_so():
    """Not what it comes to where nothing else is set."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    for key, followed in (("batches_per_step", "split.drafters"), ("output_dir", "name")):
        assert re.search(
            rf"^\| `{key}` \| \w+ \| `[^`|]*\$\{{{followed}\}}` \|", page, re.MULTILINE
        )


def test_the_readme_is_one_screen_and_its_map_names_every_file():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 68
    files = text[text.index("## Files") :]
    package = ROOT / "src" / "dflash_ddp"
    names = [file.name for file in package.glob("*.py") if file.name != "__init__.py"]
    names += [f"{folder.parent.name}/" for folder in package.glob("*/__init__.py")]
    named = re.findall(r"(?<!/)\b\w+(?:\.py|/)(?=[, \n])", files[: files.rindex("```")])
    assert sorted(named) == sorted([*names, "conf/", "launch/", "demo/"])
