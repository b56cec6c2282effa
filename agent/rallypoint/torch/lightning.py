"""A callback for PyTorch Lightning.

from rallypoint.torch.lightning import LightningCallback

trainer = Trainer(callbacks=[LightningCallback()])
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from rallypoint.torch.steps import Steps

# Lightning is published under two names, whose classes differ: the one that the program uses.
if "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
else:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        from lightning.pytorch import Callback

__all__ = ["LightningCallback"]


class LightningCallback(Callback):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Reports each batch as progress, guards it by a timeout, and saves a checkpoint before the host leaves.

    Without an agent it does nothing.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        after: float | Literal["auto"] | None = "auto",
        every_n_steps: int = 10,
    ) -> None:
        """Make a callback for one Trainer.

        Args:
            checkpoint: path of the checkpoint, on storage of all hosts, for `Trainer.fit(ckpt_path=...)`. Default:
                rallypoint.ckpt in the Trainer's `default_root_dir`.
            after: timeout of a training batch in seconds; "auto": learned; None: batches are not guarded. See
                `rallypoint.timer.expires`.
            every_n_steps: optimizer steps between two looks for an announced departure. Each is a reduction over all
                ranks, and on a GPU a wait for it.

        Raises:
            ValueError, TypeError: an argument is invalid.
        """
        super().__init__()
        self._checkpoint = checkpoint
        self._steps = Steps(after, every_n_steps)
        self._last = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the step that training goes on from."""
        self._last = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a batch."""
        self._steps.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a batch; save a checkpoint if a host will leave."""
        if trainer.global_step == self._last:
            # A batch whose gradients are accumulated: no step of the optimizer has ended.
            self._steps.leave()
            return
        self._last = trainer.global_step
        if self._steps.end(trainer.global_step, pl_module.device):
            path = self._checkpoint or os.path.join(trainer.default_root_dir, "rallypoint.ckpt")
            trainer.save_checkpoint(path)
            self._steps.saved()

    def leave(self, *arguments: Any) -> None:
        """Leave a batch that has not ended: it raised, or a callback has skipped the rest of the epoch."""
        self._steps.leave()

    on_exception = on_train_epoch_end = on_validation_start = leave
