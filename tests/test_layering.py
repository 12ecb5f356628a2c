"""Dependencies point one way; read from the source, so that nothing has to be imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# These run in the physics process or in one that draws a video, which must start without torch.
TORCH_FREE = [
    ROOT / "unilab" / "names.py",
    ROOT / "unilab" / "collector.py",
    ROOT / "unilab" / "channel.py",
    ROOT / "unilab" / "stacks.py",
    ROOT / "unilab" / "video.py",
    *sorted((ROOT / "unilab" / "physics").glob("*.py")),
]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in the file; relative imports made absolute."""
    found: set[str] = set()
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", modules("unilab"), ids=name_of)
def test_the_trainer_never_imports_the_suite(path: Path) -> None:
    assert not [name for name in imported(path) if under(name, "repro")]


@pytest.mark.parametrize("path", modules("repro"), ids=name_of)
def test_the_suite_imports_only_names_from_the_trainer(path: Path) -> None:
    from_trainer = [name for name in imported(path) if under(name, "unilab")]
    assert not [name for name in from_trainer if not under(name, "unilab.names")]
    assert not [name for name in imported(path) if under(name, "torch")]


@pytest.mark.parametrize("path", [path for path in TORCH_FREE if path.exists()], ids=name_of)
def test_the_physics_process_never_imports_torch(path: Path) -> None:
    seen: set[Path] = set()
    waiting = [path]
    while waiting:  # through the project's own modules too
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        names = imported(current)
        assert not [name for name in names if under(name, "torch")], f"{name_of(current)}, reached from {name_of(path)}"
        waiting += [file for name in names if under(name, "unilab") for file in files_of(name)]


def files_of(name: str) -> list[Path]:
    """Source files that importing a dotted name runs: its module, or the module that defines it, and their packages."""
    parts = name.split(".")
    candidates = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    files = [path.with_suffix(".py") for path in candidates] + [path / "__init__.py" for path in candidates]
    return [path for path in files if path.is_file()]


def test_names_import_nothing() -> None:
    assert imported(ROOT / "unilab" / "names.py") == set()


def test_the_check_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layering.ROOT", tmp_path)
    path = tmp_path / "unilab" / "physics" / "pool.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "def f():\n    import torch.nn\n    from repro import cli\n    from ..names import X\n    from . import spec\n"
    )
    assert imported(path) == {"torch.nn", "repro.cli", "unilab.names.X", "unilab.physics.spec"}
