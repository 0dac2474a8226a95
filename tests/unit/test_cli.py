"""The commands: what they print and write, and how they fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ragged import Plan
from ragged.cli import main
from ragged.cli.models import load_model, parse_dtype
from tests.programs import Ahead, execute


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code = main(args)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_plan_prints_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "plan", "gpt2", "--ranks", "8")
    assert "transformer.h.0" in out
    assert "(12x)" in out
    assert "124,439,808" in out


def test_plan_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ("plan", "gpt2", "--ranks", "6", "--block", "**.c_attn.weight=32x32", "64", "--dtype", "fp32", "--json")
    out = printed(capsys, *args)
    made = Plan.from_json(out, like=load_model("gpt2", parse_dtype("fp32")))
    assert made.leaves["transformer.h.3.attn.c_attn.weight"].block == 32 * 2304
    assert made.leaves["transformer.h.3.mlp.c_fc.weight"].block == 64
    assert made.leaves["transformer.h.3.mlp.c_fc.bias"].block == 1
    assert "(12x)" in printed(capsys, *args, str(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_text() == out


def test_plan_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("plan", "gpt2", "--ranks", "4", "--units", "transformer.*", "re:transformer.h.[0-9]+", "--align", "128")
    made = json.loads(printed(capsys, *args, "--price", "500000", "--json"))
    assert (made["align"], made["axes"]) == (128, [["fsdp", 4]])
    names = [unit["name"] for unit in made["units"]]
    assert names == ["transformer.h", "transformer.ln_f", "transformer.wpe", "transformer.wte"]


def test_plan_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed(capsys, "plan", "gpt2", "--ranks", "8", "--svg", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_plan_of_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    header = {
        f"blocks.{i}.w": {"dtype": "F16", "shape": [8, 8], "data_offsets": [128 * i, 128 * i + 128]} for i in (0, 1)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    made = json.loads(printed(capsys, "plan", str(path), "--ranks", "1", "--json"))
    assert [unit["name"] for unit in made["units"]] == ["blocks.0", "blocks.1"]
    assert made["units"][0]["buckets"][0]["dtype"] == "float16"


def test_advise(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "advise", "gpt2", "--ranks", "64", "--memory", "0.5", "--layers-per-unit", "3", "1", "3")
    lines = out.splitlines()
    assert lines[0] == "gpt2: 124,439,808 elements in 148 leaves, bfloat16; 64 ranks"
    rows = [line.split() for line in lines[3 : lines.index("", 3)]]
    assert {row[0] for row in rows} == {"8", "16", "32", "64"}
    assert len(rows) == 4 * 2 * 2
    assert "recommended: " in out


def test_advise_with_blocks_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("advise", "gpt2", "--ranks", "8", "--groups", "8", "--layers-per-unit", "1", "--state-bytes", "2")
    default = printed(capsys, *args, "--block", "**.wte.weight=row")
    assert "32r = 32x32" in default
    assert "2 bytes per element of optimizer state" in default
    assert "16x16" in printed(capsys, *args, "--block", "**.wte.weight=row", "16x16")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: plan | advise"),
        (["draw"], "invalid choice: 'draw'"),
        (["plan", "gpt2"], "required: --ranks; see python -m ragged plan --help"),
        (["plan", "gpt2", "--ranks", "0"], "--ranks: expected a whole number of at least 1, got '0'"),
        (["plan", "gpt2", "--ranks", "8", "--dtype", "int3"], "--dtype: unknown dtype 'int3'"),
        (["plan", "gpt2", "--ranks", "8", "--block", "large"], "--block: block 'large': expected row"),
        (["plan", "gpt2", "--ranks", "8", "--units", "re:("], "--units: pattern 're:(' is no regular expression"),
        (["plan", "gpt2", "--ranks", "8", "--units", "layers.*"], "units pattern 'layers.*' matches no leaf"),
        (["plan", "gpt2", "--ranks", "8", "--price", "nan"], "--price: expected a whole number of at least 0"),
        (["plan", "gpt2", "--ranks", "8", "--svg", "/no/such/folder/x.svg"], "No such file or directory"),
        (["plan", "gpt9", "--ranks", "8"], "'gpt9' is no file, and no built-in model; built in are deepseek-v3"),
        (["advise", "gpt2", "--ranks", "8", "--groups", "3"], "a shard group of 3 ranks does not divide 8 ranks"),
        (["advise", "gpt2", "--ranks", "8", "--svg", "x"], "unrecognized arguments: --svg x"),
        (["advise", "gpt2", "--ranks", "8", "--memory", "lots"], "--memory: expected a number"),
        (["advise", "gpt2", "--ranks", "8", "--memory", "nan"], "--memory: expected a number of zero or more"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(args)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def program(_: Path) -> subprocess.CompletedProcess[str]:
    return execute("-m", "ragged", "plan", "gpt2", "--ranks", "x", code=2, quiet=False)


AHEAD = [program]


def test_as_a_program(ahead: Ahead) -> None:
    done = ahead(program)
    assert done.stdout == ""
    assert done.stderr.startswith("error: argument --ranks: expected a whole number of at least 1, got 'x'")


@pytest.mark.parametrize("command", [(), ("plan",), ("advise",)])
def test_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "usage: python -m ragged" in out
    assert not command or "MODEL --ranks N" in out
