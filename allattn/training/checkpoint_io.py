"""Lightning's checkpoint files, written and read as `checkpoints` does."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from allattn.training.checkpoints import read_checkpoint, write_checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under another name first, so that a file with the final name is always whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """See `write_checkpoint`."""
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Read with `weights_only=True`, whatever the caller asks."""
        return read_checkpoint(Path(path))
