"""Commands and snippets in the documents run as written; names and settings in them exist."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

import qtuning
from qtuning import cli, config, demo
from qtuning.errors import CollectionError
from qtuning.serve.run import free_port
from tests.conftest import make_model, make_tokenizer
from tests.docs.committed import ROOT

PAGES = [ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = ("qtuning demo", "make ", "cd ", "git ", "pip ", "source ")
"""Commands that other tests run, or that set up a machine."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the examples in it, as a user's clone has them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the commands of a block."""

    def run(block: str) -> None:
        for line in block.splitlines():
            command = line.split(" #")[0].strip()
            if not command or command.startswith(SLOW):
                continue
            words = shlex.split(command)
            assert words[0] == "qtuning", command
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code in (0, None), (command, capsys.readouterr().err)

    return run


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_and_commands_run(page: Path, workplace: Path, call) -> None:
    for block in blocks(page, "bash"):
        call(block)
    shutil.rmtree(workplace / "support", ignore_errors=True)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.skipif(shutil.which("curl") is None, reason="its commands use curl")
def test_the_support_teams_month(workplace: Path) -> None:
    """Blocks of `shell`, all in one shell; the port is a free one."""
    port = str(free_port("127.0.0.1"))
    text = "\n".join(blocks(ROOT / "docs" / "serving.md", "shell")).replace(":8000", f":{port}")
    text = text.replace("qtuning serve support", f"qtuning serve support --port {port}")
    script = f'qtuning() {{ "{sys.executable}" -c "from qtuning.cli import main; main()" "$@"; }}'
    serve = f'"{sys.executable}" -c "from qtuning.cli import main; main()" serve'  # $! is its own
    whole = "\n".join(["set -euo pipefail", script, text.replace("qtuning serve", serve)])
    found = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr + found.stdout
    said = found.stdout
    assert said.count('"state": "done"') == 2
    assert '"removed":"refunds"' in said
    assert '"task": "delivery", "label": ' in said
    assert "accepted requests were answered" in said
    left = json.loads((workplace / "support" / "manifest.json").read_text())["tasks"]
    assert list(left) == ["delivery", "account"]


@pytest.mark.ray
def test_commands_on_ray_run(workplace: Path, call) -> None:
    """Blocks of `sh`, after those of `bash` that they build on."""
    page = ROOT / "docs" / "sweeps.md"
    for block in [*blocks(page, "bash"), *blocks(page, "sh")]:
        call(block)
    assert (workplace / "labelled.csv").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not place or place in headings(file), f"{target}#{place}"


def headings(page: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readmes_figures_are_those_of_the_records() -> None:
    records = [
        json.loads(file.read_text()) for file in sorted((ROOT / "results").glob("demo-seed*.json"))
    ]
    assert [record["seed"] for record in records] == [0, 1, 2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- demo-figures -->")[1].split("<!-- /demo-figures -->")[0]
    found = [float(value) for value in re.findall(r"\| (-?\d+\.\d) \|", table)]
    keys = ("average_score", "linear_probe", "majority_class", "backward_transfer")
    means = [100 * sum(record[key] for record in records) / len(records) for key in keys]
    assert found == [round(mean, 1) + 0.0 for mean in means]


def settings_table() -> str:
    """One line per setting: name, default, the sentence under the field."""
    lines = ["| setting | default | what |", "|---|---|---|"]
    for cls in (config.MethodSettings, config.TrainSettings):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        said = {
            field.target.id: doc.value.value
            for field, doc in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
        }
        for field in fields(cls):
            lines.append(f"| `{field.name}` | `{field.default}` | {said[field.name]} |")
    return "\n".join(lines)


def test_the_settings_table_is_current() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    found = page.split("<!-- settings -->\n")[1].split("\n<!-- /settings -->")[0]
    assert found == settings_table()


def test_public_names_are_documented() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in set(qtuning.__all__) - {"__version__"}:
        assert f"`{name}`" in reference, name


def test_the_paper_index_names_code_that_exists() -> None:
    source = ROOT / "src" / "qtuning"
    text = (ROOT / "docs" / "paper-index.md").read_text(encoding="utf-8")
    for module, name in re.findall(r"`((?:methods/)?\w+)\.((?!py)\w+)", text):
        assert f" {name}(" in (source / f"{module}.py").read_text().replace(":", "("), (
            module,
            name,
        )


def test_the_demo_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo` shows, in seconds: matrix, zero forgetting, predictions, where it was saved."""
    folder = tmp_path / "model"
    make_model("bert").save_pretrained(folder)
    make_tokenizer("bert").save_pretrained(folder)
    tiny = {**demo.SETTINGS, "epochs": 1, "prompt_length": 2, "shared_length": 2}
    monkeypatch.setattr(demo, "SETTINGS", tiny)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    demo.run_demo(tmp_path / "out", str(folder), console=console)
    shown = " ".join(console.export_text().split())
    assert "byte for byte as when learnt 8 of 8" in shown
    assert "forgetting (backward transfer) 0.0%" in shown
    assert "weights unchanged (sha256) yes" in shown
    assert "times the full queue made room 4" in shown
    assert "a linear probe on the same texts" in shown
    assert "predict" in shown
    assert (tmp_path / "out-report.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "manifest.json").exists()
    assert len(qtuning.QTuner.from_pretrained(tmp_path / "out").tasks) == 8


def test_the_demo_does_not_overwrite_a_users_task(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("bert").save_pretrained(folder)
    make_tokenizer("bert").save_pretrained(folder)
    tuner = qtuning.QTuner(str(folder), epochs=1, prompt_length=2, shared_length=2, queue_size=2)
    tuner.learn(qtuning.Task("mine", ["a", "b", "c", "d"] * 3, ["x", "y"] * 6), progress=False)
    tuner.save_pretrained(tmp_path / "out")
    with pytest.raises(CollectionError, match="'mine', which the demo did not teach"):
        demo.run_demo(tmp_path / "out", str(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectionError, match="is a file"):
        demo.run_demo(tmp_path / "file", str(folder))
