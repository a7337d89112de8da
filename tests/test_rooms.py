"""The rooms' import rule: a module imports only what is listed before it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "allattn"
ORDER = [
    "errors",
    "randomness",
    "devices",
    "files",
    "data",
    "model",
    "heads",
    "pretrained",
    "families",
    "pruning",
    "pictures",
    "training",
    "record",
    "settings",
    "stages",
    "comparison",
    "benchmark",
    "head_study",
    "huggingface",
    "commands",
]
STRANGERS = {("model", "data"), ("heads", "data"), ("pruning", "data")}  # rooms that do not know each other


def imported_rooms(path: Path) -> set[str]:
    """Rooms of allattn that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allattn."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("allattn.")}
    return found


def test_rooms_import_only_earlier_ones() -> None:
    checked = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ORDER:
            continue  # an entry point or the package itself
        for other in imported_rooms(path) - {room}:
            assert ORDER.index(other) < ORDER.index(room), f"{path} imports {other}"
            assert (room, other) not in STRANGERS, f"{path} imports {other}"
            checked += 1
    assert checked > 30


def test_the_drawing_shows_the_rooms_in_order() -> None:
    """docs/contributing.md draws what the code holds to."""
    page = (PACKAGE.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    drawing = page.split("```text\n")[1].split("```")[0]
    drawn = [name for line in drawing.splitlines() for name in line.split("  ")[0].split(", ")]
    assert [name.strip() for name in drawn if name.strip(" |")] == ORDER


def test_one_room_draws() -> None:
    """matplotlib is imported in pictures/ alone."""
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        if any(name.partition(".")[0] == "matplotlib" for name in names):
            assert path.parent == PACKAGE / "pictures", f"{path} imports matplotlib"
