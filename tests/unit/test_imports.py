"""What may import what, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import qtuning

SOURCE = Path(qtuning.__file__).parent
CORE = (
    "errors",
    "config",
    "seeding",
    "tasks",
    "prompts",
    "eviction",
    "queue",
    "objectives",
    "evaluation",
)
LIGHT = {"torch", "numpy", "qtuning"}
PATH_TO_A_SCORE = LIGHT | {
    "transformers",
    "safetensors",
    "yaml",
    "rich",
    "huggingface_hub",
    "jinja2",
    "markupsafe",  # comes with jinja2
}
EDGES = {
    "cli.py",
    "cli_runs.py",
    "cli_sweep.py",
    "cli_tune.py",
    "cli_export.py",
    "cli_serve.py",
    "ray_cluster.py",
    "labelling.py",
    "sources.py",
    "task_files.py",
    "data.py",
    "idbr.py",
    "trackers.py",
    "export.py",
    "tree_kernel.py",
}


def imports_of(file: Path, everywhere: bool) -> set[str]:
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def test_the_core_imports_torch_and_numpy_only() -> None:
    for name in CORE:
        assert imports_of(SOURCE / f"{name}.py", everywhere=False) <= LIGHT, name


def test_the_way_from_a_task_to_a_score_needs_little() -> None:
    for file in SOURCE.rglob("*.py"):
        if file.name not in EDGES and file.parent.name != "serve":
            assert imports_of(file, everywhere=True) <= PATH_TO_A_SCORE | {"datasets"}, file
    assert "datasets" not in imports_of(SOURCE / "tasks.py", everywhere=False)


def test_nothing_pickles() -> None:
    for file in SOURCE.rglob("*.py"):
        assert not imports_of(file, everywhere=True) & {"pickle", "dill", "joblib", "cloudpickle"}


def test_importing_costs_less_than_half_a_second_beyond_torch_and_transformers() -> None:
    code = (
        "import time, torch, transformers; t = time.perf_counter(); import qtuning; "
        "print(time.perf_counter() - t); import sys; "
        "print([m for m in ('ray', 'fastapi', 'datasets', 'plotly', 'peft', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    seconds, heavy = out.strip().splitlines()
    assert float(seconds) < 0.5
    assert heavy == "[]"


def test_every_public_name_can_be_had() -> None:
    for name in qtuning.__all__:
        assert getattr(qtuning, name) is not None
    assert (SOURCE / "py.typed").exists()


def test_files_fit_two_screens_or_thereabouts() -> None:
    for file in SOURCE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 600, file
