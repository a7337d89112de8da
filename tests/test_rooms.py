"""The rooms' import rule: a module imports only what is listed before it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "allattn"
ORDER = [
    "errors",
    "randomness",
    "files",
    "data",
    "model",
    "pruning",
    "pictures",
    "training",
    "record",
    "settings",
    "stages",
    "comparison",
    "benchmark",
    "commands",
]
STRANGERS = {("model", "data"), ("pruning", "data")}  # rooms that do not know each other


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
