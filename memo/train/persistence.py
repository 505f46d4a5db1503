"""Saves and loads a run; a thread can write checkpoints while training goes on."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from memo.artifacts.regular_file import replace_file
from memo.checkpoint.background import BackgroundWriter
from memo.checkpoint.directory import LATEST, check_names, has_checkpoint, has_pointer, remove_older, resolve_checkpoint
from memo.checkpoint.disk_space import check_disk_space
from memo.checkpoint.files import RUN_CONFIG
from memo.checkpoint.finite import check_finite
from memo.checkpoint.hugging_face.companions import keep_companions
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.hugging_face.load import frozen_from
from memo.checkpoint.owner import Ownership, claim
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import SegmentState, load_checkpoint, save_checkpoint
from memo.config import RunConfig
from memo.config.derived import resolved_save_interval_minutes
from memo.config.flag_table import dashed
from memo.config.identity import accepted_changes, differences, model_identity
from memo.config.model import CHOICES_OF_TRAINED
from memo.data.corpus import data_identity
from memo.errors import CheckpointError, ConfigError, warn, writing
from memo.estimate.state_memory import checkpoint_bytes
from memo.mesh import Mesh
from memo.mesh.objects import from_rank_zero
from memo.spec.sweep import sweep_of
from memo.train.console import say
from memo.train.feed import Feed
from memo.train.optimizer import schedule_of
from memo.train.outputs import loaded_config
from memo.train.parallel_model import ParallelModel


def own_directory(config: RunConfig, mesh: Mesh) -> Ownership | None:
    """Claim the directory of --save for this run, and check that checkpoints have room there; collective.

    Returns the claim, which rank 0 must release at the end; None on other ranks and without --save. Raises, on every
    rank, CheckpointError for a directory that another run uses or that cannot be written, and ResourceError for a full
    disk.
    """
    save, owned = config.checkpoint.save, list[Ownership]()
    if save is None:
        return None

    def take() -> None:
        with writing(f"--save {save}", CheckpointError):
            check_names(Path(save), "--save")
            owned.append(claim(save, say))
            num_bytes = checkpoint_bytes(config, mesh.grid.world_size)
            check_disk_space(save, num_bytes, config.checkpoint.keep_latest_k)

    try:
        from_rank_zero(take, mesh.world)
    except BaseException:
        for each in owned:
            each.release()
        raise
    return owned[0] if owned else None


class Persistence:
    """Keeps one run on disk. Methods that say so are collective over all ranks.

    Under --async-save a thread writes one checkpoint at a time, and communicates over a separate process group. It
    reads the tensors in place; optimizer steps wait until they are read (memo.checkpoint.background).
    """

    def __init__(self, config: RunConfig, parts: ParallelModel, feed: Feed, owned: Ownership | None) -> None:
        """`owned`: the claim that `own_directory` returned."""
        self._owned, self._saved_s = owned, time.monotonic()
        self.config, self.mesh, self.optimizer, self.sampler = config, parts.mesh, parts.optimizer, feed.sampler
        self.router_losses = parts.router_losses
        self.model, self.data = model_identity(config), data_identity(config.data, feed.dataset)
        # The fingerprint of the model whose weights are frozen; "" if checkpoints contain all weights.
        frozen = frozen_from(config) if self.mesh.rank == 0 else None
        self.base = "" if frozen is None else TensorFiles(frozen).fingerprint()
        self.background = BackgroundWriter(parts.device) if config.checkpoint.async_save else None
        if self.background is not None:
            self.optimizer.before_update = self.background.wait_until_read

    def write_config(self) -> None:
        """Rank 0 writes the resolved configuration and the files that an export needs next to the checkpoints.

        Collective. Raises CheckpointError on every rank."""
        save = self.config.checkpoint.save
        if save is None:
            return

        def write() -> None:
            with writing(f"--save {save}", CheckpointError):
                replace_file(Path(save, RUN_CONFIG), self.config.to_toml())
                keep_companions(self.config, save)

        from_rank_zero(write, self.mesh.world)

    def load(self) -> RunState | None:
        """Resume from the newest checkpoint in --load; None if the run starts afresh. Collective.

        Fills masters, moments, weights and the sampler. Raises CheckpointError on every rank if the checkpoint cannot
        be read, is of another model or seed, or had another global batch size and no flag accepts the change.
        """
        directory = self.config.checkpoint.load
        if directory is None or not from_rank_zero(lambda: has_checkpoint(directory), self.mesh.world):
            return None
        segments, verify = self.optimizer.segment_states(), self.config.checkpoint.verify_checkpoint
        state = load_checkpoint(directory, segments, self.mesh, verify=verify, check=self._check_run)
        self.sampler.resume(state.seed, state.consumed_samples)
        self.optimizer.resume(state.optimizer_steps)
        if self.router_losses is not None:
            self.router_losses.load_state(state.expert_load)
        is_lost = not has_pointer(directory) and resolve_checkpoint(directory) != Path(directory)
        lost = f", the newest whole one there: {LATEST} is missing" if is_lost else ""
        then = loaded_config(self.config) if self.mesh.rank == 0 else None
        others = "" if then is None else self._other_tiles(then) + self._other_moments(then)
        self._print(f"loaded checkpoint {directory} at iteration {state.iteration}{lost}{others}")
        if then is not None and (schedule := self._other_schedule(then)):
            self._print(schedule)
        return state

    def _other_schedule(self, then: RunConfig) -> str:
        """A sentence if the run `then` had another schedule of the learning rate, else ""."""
        old, new = schedule_of(then), schedule_of(self.config)
        changed = [
            f"{flag} {new[flag]} (was {old.get(flag, 'not used')})" for flag in new if new[flag] != old.get(flag)
        ]
        return f"the learning rate follows another schedule from here on: {', '.join(changed)}" if changed else ""

    def _other_tiles(self, then: RunConfig) -> str:
        """A clause if layers ran on other tiles in the run `then`, because their rounding differs; else ""."""
        until, since = (
            replace(sweep_of(each), recompute_attention_layers=0, hidden_on_host=False) for each in (then, self.config)
        )
        if until.tiles == since.tiles:
            return ""
        return f"; layers were {until} until there and are {since} from here on, which rounds differently"

    def _other_moments(self, then: RunConfig) -> str:
        """A clause for each moment that had another dtype in the run `then` and is converted to this run's dtype."""
        names, until, since = ("exp_avg_dtype", "exp_avg_sq_dtype"), vars(then.training), vars(self.config.training)
        changed = [name for name in names if until[name] != since[name]]
        return "".join(f"; {dashed(name)} {since[name]} from here on, it was {until[name]}" for name in changed)

    def save(self, state: RunState, directory: str | os.PathLike[str] | None = None) -> Path:
        """Write a checkpoint under `directory`, by default --save; collective. Returns its path.

        Under --async-save this waits until the checkpoint before is whole and only begins to write; finish() waits for
        the end. Raises ConfigError without a directory, CheckpointError if the checkpoint cannot be written, and
        DivergenceError for values that are not finite; under --async-save also for the checkpoint before.
        """
        target = directory or self.config.checkpoint.save
        if target is None:
            raise ConfigError("save() needs a directory: give --save or save(directory)")
        load = [] if self.router_losses is None else self.router_losses.state()
        state = replace(state, model=self.model, data=self.data, expert_load=load, base=self.base)
        segments = self.optimizer.segment_states()
        if self.background is None:
            path = self._write(Path(target), state, segments, lambda: None)
            self._print(f"saved checkpoint {path}")
        else:
            self.background.start(lambda on_read: self._write_beside(Path(target), state, segments, on_read))
            path = Path(target) / f"iter_{state.iteration:07d}"
        if self._is_own(Path(target)):
            self._saved_s = time.monotonic()
        return path

    @property
    def is_due(self) -> bool:
        """Whether --save-interval-minutes have passed since this start or its last checkpoint; false on ranks other
        than 0."""
        interval_s = 60.0 * resolved_save_interval_minutes(self.config)
        return self.mesh.rank == 0 and 0.0 < interval_s <= time.monotonic() - self._saved_s

    @property
    def failed(self) -> bool:
        """Whether the background thread failed to write a checkpoint; finish() raises its error. Never waits."""
        return self.background is not None and self.background.failed

    def finish(self) -> None:
        """Wait until the checkpoint of save() is whole; collective. Raises CheckpointError, once, if writing failed."""
        if self.background is not None:
            self.background.finish()

    def _write(self, target: Path, state: RunState, segments: list[SegmentState], on_read: Callable[[], None]) -> Path:
        owned, group = self._owned, self.mesh.background or self.mesh.world
        if self._is_own(target):
            from_rank_zero(lambda: None if owned is None else owned.check(), group)
        check_finite(segments, state.iteration, group)
        path = save_checkpoint(target, state, segments, self.mesh, group=group, on_read=on_read)
        self._remove_older(path)
        return path

    def _write_beside(
        self, target: Path, state: RunState, segments: list[SegmentState], on_read: Callable[[], None]
    ) -> None:
        assert self.background is not None
        path = self._write(target, state, segments, on_read)
        taken_s, waited_s = self.background.times_s()
        self._print(f"saved checkpoint {path}: {taken_s:.2f} s beside training, which waited {waited_s:.2f} s for it")

    def _remove_older(self, path: Path) -> None:
        """Remove old checkpoints of --save; warns if that fails, which is no reason to end a run."""
        keep_latest_k = self.config.checkpoint.keep_latest_k
        if self.mesh.rank != 0 or not self._is_own(path.parent):
            return
        try:
            remove_older(path, keep_latest_k)
        except OSError as error:
            warn(f"--keep-latest-k {keep_latest_k}: {error}: delete it by hand")

    def _is_own(self, directory: Path) -> bool:
        """Whether `directory` is the directory of --save, rather than a directory that a caller gave to save()."""
        save = self.config.checkpoint.save
        return save is not None and directory == Path(save)

    def _check_run(self, state: RunState, fits: bool) -> None:
        """Raises CheckpointError if the model or the data of the checkpoint differ, except for accepted changes, which
        can be accepted where the weights fit."""
        checkpoint = self.config.checkpoint
        accepted = accepted_changes(checkpoint.load_accept_changes)
        trained = [f"{k} {v}" for k, v in differences(state.model, self.model).items() if k in CHOICES_OF_TRAINED]
        if trained:
            raise CheckpointError(
                f"--load {checkpoint.load}: its run trained other parameters: {'; '.join(trained)}; a checkpoint has "
                "the moments of those alone: give the flags of that run, or write its model with `memo export "
                f"{checkpoint.load} --out DIR` and start from it with --model DIR"
            )
        changed = differences(state.model, self.model, accepted) | differences(state.data, self.data, accepted)
        if changed:
            accept = f", or accept what changes with --load-accept-changes {','.join(changed)}" if fits else ""
            raise CheckpointError(
                f"--load {checkpoint.load}: its run was another: {'; '.join(f'{k} {v}' for k, v in changed.items())}: "
                f"give the flags of that run{accept}"
            )
        self._check_base(str(checkpoint.load), state)
        self._check_global_batch(str(checkpoint.load), state)

    def _check_base(self, directory: str, state: RunState) -> None:
        given = self.config.checkpoint.pretrained_checkpoint
        if state.base == self.base:
            return
        if not state.base:
            raise CheckpointError(
                f"--load {directory} has the frozen weights of its run, which are those of no directory, and "
                f"--pretrained-checkpoint {given} names one: give --pretrained-checkpoint None"
            )
        remedy = "give the Hugging Face directory that its run started from with --pretrained-checkpoint"
        if not self.base:
            raise CheckpointError(f"--load {directory} lacks the weights that its run had frozen: {remedy}")
        raise CheckpointError(
            f"--load {directory} is of adapters beside other weights than those of --pretrained-checkpoint {given}: "
            f"{remedy}"
        )

    def _check_global_batch(self, directory: str, state: RunState) -> None:
        then, now = state.global_batch_size, self.sampler.global_batch_size
        if then in (0, now):
            return
        if self.config.training.global_batch_size is None:
            raise CheckpointError(
                f"--load {directory}: its run took {then} samples a step, but this one takes {now}, as "
                "--global-batch-size is not given and follows the number of ranks: give --global-batch-size "
                f"{then} to go on as before, or {now} to change it"
            )
        self._print(f"--global-batch-size {now} from here on; it was {then}")

    def _print(self, text: str) -> None:
        if self.mesh.rank == 0:
            say(text)
