"""Text files are UTF-8 whatever the terminal's encoding is."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "allattn"


def names_no_encoding(call: ast.Call) -> bool:
    """Whether a call opens a file as text, in the encoding of the place."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if ast.unparse(call.func) == "os.open" or name not in ("open", "read_text", "write_text"):
        return False
    if any(k.arg == "encoding" for k in call.keywords):
        return False
    words = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return name != "open" or not any("b" in word for word in words)


def test_every_text_file_is_opened_with_its_encoding() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and names_no_encoding(node):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found
    (bad,) = ast.parse("path.write_text(text)").body
    assert isinstance(bad, ast.Expr)
    assert isinstance(bad.value, ast.Call)
    assert names_no_encoding(bad.value), "so it would be found"
