"""Small commands say what they do and take, and refuse a key that is given twice."""

import sys

import pytest

from dflash_ddp import evaluate, export, plan, report
from dflash_ddp.bench import __main__ as bench
from dflash_ddp.bench.lane import LaneOptions
from dflash_ddp.bench.options import read_options
from dflash_ddp.config import ConfigError
from dflash_ddp.settings import command_line, setting_keys
from dflash_ddp.usage import fields_of

COMMANDS = {
    plan: plan.PlanOptions,
    report: report.ReportOptions,
    evaluate: evaluate.EvaluateConfig,
    export: export.ExportConfig,
}
SCHEMAS = [*COMMANDS.values(), *(schema for schema, _ in bench.BENCHES.values())]


def said(monkeypatch, capsys, module, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_says_what_the_command_does_and_every_key(monkeypatch, capsys, module, word):
    text = said(monkeypatch, capsys, module, "run=x", word)
    assert text.startswith(module.__doc__.strip().splitlines()[0])
    for key, _, meaning in fields_of(COMMANDS[module]):
        assert f"  {key}=" in text
        assert meaning
        assert meaning in text


def test_help_of_the_benchmarks(monkeypatch, capsys):
    text = said(monkeypatch, capsys, bench, "--help")
    assert "capture of context features" in text
    for name, (schema, _) in bench.BENCHES.items():
        assert f"\n  {name} {next(setting_keys(schema))}=" in text
        assert all(
            f"  {key}=" in said(monkeypatch, capsys, bench, name, "--help")
            for key in setting_keys(schema)
        )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_key_given_twice_is_refused(schema):
    for key in setting_keys(schema):
        with pytest.raises(ConfigError, match=f"{key} is given 2 times: give it once"):
            command_line(schema, [f"{key}=1", f"{key}=2"])


def test_values_of_a_list_stand_between_commas():
    options = read_options(LaneOptions, ["gib=1,2.5", "ctas=4,default"])
    assert (options.gib, options.ctas) == ([1.0, 2.5], ["4", "default"])
    for wrong in ("gib=", "gib=1,x", "gib=0"):
        with pytest.raises(ConfigError, match="gib"):
            read_options(LaneOptions, [wrong])
