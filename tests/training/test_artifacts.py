"""Which artifact a local checkpoint is."""

from pathlib import Path

from allattn.training.artifacts import artifact_source, forget_artifact, note_artifact

NAME = "lab/allattn/dense:v3"


def test_a_noted_checkpoint_is_its_artifact_until_it_changes(tmp_path: Path) -> None:
    last, best = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    last.write_bytes(b"last")
    best.write_bytes(b"best")
    assert artifact_source(str(last)) is None
    note_artifact(last, NAME)
    assert artifact_source(str(last)) == NAME
    assert artifact_source(str(best)) is None, "only the one beside it was put up"
    last.write_bytes(b"trained on")
    assert artifact_source(str(last)) is None
    last.write_bytes(b"last")
    forget_artifact(last)
    assert artifact_source(str(last)) is None


def test_a_reference_is_its_artifact() -> None:
    assert artifact_source(f"wandb:{NAME}") == NAME
