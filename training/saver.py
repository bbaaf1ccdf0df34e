"""When a run's checkpoints are written and what a failure does: at once or behind training, again, or not at all.

With `async_save` a thread of each rank copies the state while the next forward and backward pass, which only read it,
run, and then writes the copy; the next update waits until the copy is there. After every step the ranks agree
whether all of them are done, and then publish together, so no thread ever talks to another rank. The next
save and the end of the run wait for the last one.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import checkpoint_info, save_error, state_tensors
from training.launch import tell
from training.saving import Agreement, Save, agree, prune
from training.step_folders import step_folder_name
from training.trainer import Trainer


class Saver:
    """Saves a run as its settings say; every rank has one, and all call it in the same order.

    Args:
        trainer: The run.
        root: Folder of its step folders.

    Attributes:
        failed_saves: Checkpoints that were given up.
    """

    def __init__(self, trainer: Trainer, root: Path) -> None:
        self.trainer, self.root = trainer, root
        self.failed_saves = 0
        self._buffers: dict[str, Tensor] = {}
        self._agreement: Agreement | None = None
        self._save: Save | None = None
        self._step = 0
        self._attempt = 0
        self._is_required = False
        self._begins_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        trainer.before_update = self._is_copied.wait

    def save(self, *, is_required: bool = False) -> None:
        """Save the state as it is now, after an earlier save has ended.

        Args:
            is_required: The run ends here: do not return before the checkpoint is whole, whatever
                `async_save` and `on_save_error` say.

        Raises:
            ShardlineError: The disk refused, `save_retries` times more too, and the run must not go on without.
        """
        self.wait()
        trainer = self.trainer
        if self._agreement is None:
            self._agreement = agree(state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer))
        save = Save(self._agreement, self.root / step_folder_name(trainer.step), checkpoint_info(trainer))
        self._step, self._attempt, self._is_required = trainer.step, 0, is_required
        save.prepare()
        if trainer.config.async_save and not is_required:
            self._save = save
            self._is_copied.clear()
            self._start(self._copy_and_write, save)
        else:
            save.write()
            self._save = save
            self._settle(save)
            self.wait()

    def look(self) -> None:
        """Publish a save that has ended on all ranks, and begin one that is due again; after every step."""
        if self._save is None:
            return
        is_ready = not self._thread.is_alive() if self._thread is not None else time.monotonic() >= self._begins_at
        votes = torch.tensor([float(is_ready)], device=self.trainer.mesh.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        if votes.item() > 0:
            self._advance(self._save)

    def wait(self) -> None:
        """Wait until no save is under way."""
        while self._save is not None:
            if self._thread is None:
                time.sleep(max(0.0, self._begins_at - time.monotonic()))
            else:
                self._thread.join()
            self._advance(self._save)

    def _advance(self, save: Save) -> None:
        if self._thread is None:
            save.prepare()
            self._start(save.write)
        else:
            self._thread.join()
            self._thread = None
            self._settle(save)

    def _settle(self, save: Save) -> None:
        config = self.trainer.config
        reason = save.settle()
        if reason is None:
            self._save = None
            self._prune()
        elif self._attempt < config.save_retries:
            delay_s = config.save_retry_s * 2**self._attempt
            self._attempt += 1
            self._begins_at = time.monotonic() + delay_s
            self._say(
                f"warning: the checkpoint of step {self._step} could not be written ({reason}); retry "
                f"{self._attempt} of {config.save_retries} follows in {delay_s:g} s"
            )
        else:
            self._save = None
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self.failed_saves += 1
        error = save_error(self._step, self.root, reason)
        if self._is_required or self.trainer.config.on_save_error == "stop":
            raise error
        self._say(f"warning: {error} Training goes on without it (on_save_error: continue).")

    def _prune(self) -> None:
        if dist.get_rank() == 0:
            try:
                prune(self.root, self.trainer.config.keep_last)
            except OSError as error:
                tell(f"warning: an old checkpoint could not be removed ({error}); the next save tries again")

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            tell(text)

    def _copy_and_write(self, save: Save) -> None:
        try:
            save.stage(self._buffers)
        finally:
            self._is_copied.set()
        save.write()

    def _start(self, work: Callable[..., None], *arguments: Save) -> None:
        # Not a daemon: an interpreter that ends by itself waits for what is being written.
        self._thread = threading.Thread(target=work, args=arguments, name="checkpoint")
        self._thread.start()
