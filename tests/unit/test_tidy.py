"""Style as a test: what the style guide asks for and ruff cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src" / "avow").rglob("*.py"))
FILES = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
TRACKED = [ROOT / name for name in FILES.split("\0") if name and (ROOT / name).is_file()]

# The pure core: all that it may import, and from its own package only the modules listed here.
PURE = ("errors", "guarantee", "ledger", "model")
STDLIB = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "sys", "types", "typing"}

# In parts, so that the names themselves stand nowhere in the repository.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("repo1", "maven", "org"),
        ("repo", "maven", "apache", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
    )
]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: ast.Module) -> set[str]:
    """Every module a module imports, ``from avow import x`` as ``avow.x``."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "no relative imports"
            names |= {f"avow.{alias.name}" for alias in node.names} if node.module == "avow" else {node.module}
    return names


def calls(node: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


@pytest.mark.parametrize("name", PURE)
def test_the_core_is_pure(name: str) -> None:
    module = tree(ROOT / "src" / "avow" / f"{name}.py")
    ours = {f"avow.{pure}" for pure in PURE}
    foreign = {found for found in imports(module) - ours if found.split(".")[0] not in STDLIB}
    assert foreign == set()
    # The model may report what it found, in main and nowhere else.
    body = [node for node in module.body if not (isinstance(node, ast.FunctionDef) and node.name == "main")]
    assert set().union(*map(calls, body)) & {"open", "print", "input", "exec", "eval"} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path))


def test_no_module_is_named_for_nothing() -> None:
    vague = {"util", "utils", "helper", "helpers", "common", "misc"}
    parts = {path: {part.removesuffix(".py") for part in path.relative_to(ROOT).parts} for path in TRACKED}
    assert [path for path in TRACKED if vague & parts[path]] == []


def test_no_file_names_a_package_registry() -> None:
    pattern = re.compile("|".join(map(re.escape, REGISTRIES)).encode(), re.IGNORECASE)
    assert [path for path in TRACKED if pattern.search(path.read_bytes())] == []


def test_nobody_asks_librdkafka_what_ends_the_process() -> None:
    """The admin client's request for a group's offsets: ``kafka.committed`` says why, and asks otherwise."""
    deadly = "list_consumer_group_" + "offsets"
    assert [path.name for path in TRACKED if path.suffix == ".py" and deadly in path.read_text(encoding="utf-8")] == []


def test_there_is_one_lock() -> None:
    assert not (ROOT / "uv.lock").exists()
    assert ROOT / "requirements.lock" in TRACKED


def test_every_make_target_has_its_help() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    targets = {line.split(":")[0]: "## " in line for line in lines if re.match(r"[a-z][a-z-]*:(?!=)", line)}
    assert [target for target, helped in targets.items() if not helped] == []
    (phony,) = (line.split()[1:] for line in lines if line.startswith(".PHONY:"))
    assert set(phony) == set(targets)


# Who may read or change the environment, and what for. None of it changes what a pipeline delivers, or in which order:
# hooks that do are values that tests and the proof pass in (``avow.prove.hooked`` is their only door).
ENVIRONMENT = {
    "cli/demo.py": "what it gives to the commands that it starts",
    "dashboard/jobs.py": "what it gives to the processes that it starts",
    "engines/session.py": "pyspark's own variables, restored at once",
    "engines/sql.py": "Spark's folder for temporary files",
    "local/jars.py": "where jars are kept and fetched from",
    "local/java.py": "JAVA_HOME",
    "local/part.py": "what it gives to the processes that it starts",
    "local/class_archive.py": "the folder for caches",
    "local/spark.py": "pyspark's own variable in a process of its own",
    "pipeline.py": "what ${env:NAME} is filled in from",
    "plan.py": "what ${env:NAME} is filled in from",
    "settings/read.py": "what ${env:NAME} is filled in from",
    "testing/install.py": "PYTHONPATH, for the processes of a test",
}


def test_no_environment_variable_changes_what_a_pipeline_delivers() -> None:
    package = ROOT / "src" / "avow"
    readers = {
        str(path.relative_to(package)) for path in MODULES if re.search(r"\b(environ|environb|getenv)\b", _code(path))
    }
    assert {name for name in readers if not name.startswith("prove/")} == set(ENVIRONMENT)
    below = [path for path in MODULES if path.relative_to(package).parts[0] not in ("prove", "cli", "dashboard")]
    assert [path for path in below if any(name.startswith("avow.prove") for name in imports(tree(path)))] == []


def _code(path: Path) -> str:
    """Without comments and docstrings."""
    return ast.unparse(_Bare().visit(tree(path)))


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node
