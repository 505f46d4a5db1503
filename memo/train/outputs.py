"""Checks the files of --save, --load and the logs, and refuses bad ones before anything starts; reads the
configuration of --load."""

import configparser
import contextlib
import errno
import netrc
import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from memo.artifacts.regular_file import other_kind
from memo.artifacts.run_log import check_log
from memo.checkpoint.directory import has_checkpoint, resolve_checkpoint
from memo.checkpoint.files import RUN_CONFIG, RUN_STATE
from memo.config import RunConfig
from memo.config.run import CheckpointConfig, read_toml
from memo.errors import CheckpointError, ConfigError
from memo.train.heartbeat import check_heartbeat


def check_files(config: RunConfig) -> None:
    """Raises ConfigError or CheckpointError, alike on all ranks that see the same files."""
    _check_load(config.checkpoint)
    _check_save(config.checkpoint)
    check_writable("--save", config.checkpoint.save, is_directory=True)
    check_writable("--log-jsonl", config.logging.log_jsonl, is_directory=False)
    if config.logging.log_jsonl is not None and os.path.exists(config.logging.log_jsonl):
        check_log(config.logging.log_jsonl)
    check_writable("--heartbeat-file", config.logging.heartbeat_file, is_directory=False)
    if config.logging.heartbeat_file is not None and os.path.exists(config.logging.heartbeat_file):
        check_heartbeat(config.logging.heartbeat_file)
    check_writable("--tensorboard-dir", config.logging.tensorboard_dir, is_directory=True)
    if (
        config.logging.wandb_project is not None and os.environ.get("RANK", "0") == "0"
    ):  # the only rank that writes to it
        _check_wandb(config.logging.wandb_project)


def loaded_config(config: RunConfig) -> RunConfig | None:
    """The configuration of the run in --load; None without a checkpoint, or without a readable configuration there."""
    load = config.checkpoint.load
    if load is None or not has_checkpoint(load):
        return None
    try:
        return RunConfig().override(read_toml(resolve_checkpoint(load).parent / RUN_CONFIG))
    except (ConfigError, CheckpointError):  # the checkpoint was moved alone, or is of another version of memo
        return None


def goes_on(checkpoint: CheckpointConfig) -> bool:
    """Whether --load is the directory of --save, or one checkpoint in it."""
    save, load = checkpoint.save, checkpoint.load
    if save is None or load is None:
        return False
    real = _real(load)
    return _real(save) in ((real, real.parent) if os.path.exists(real / RUN_STATE) else (real,))


def _real(path: str) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a name that no file can have
        return Path(path)


def _check_load(checkpoint: CheckpointConfig) -> None:
    """--load must name a checkpoint, unless this run itself will save its first checkpoint there."""
    load = checkpoint.load
    if load is not None and (has_checkpoint(load) or not goes_on(checkpoint)):
        resolve_checkpoint(load)


def _check_save(checkpoint: CheckpointConfig) -> None:
    """A new run must not add its checkpoints to those of an earlier run, move its pointer back or append to its log."""
    save, load = checkpoint.save, checkpoint.load
    if save is None or goes_on(checkpoint) or not has_checkpoint(save):
        return
    found, now = resolve_checkpoint(save).name, "is not given" if load is None else f"is {load}"
    raise ConfigError(
        f"--save {save} holds {found} of an earlier run, but --load {now}: give --load {save} to go on with that run, "
        "or --save another directory; to start it anew, remove this one"
    )


def check_writable(flag: str, value: str | None, is_directory: bool) -> None:
    """Raises ConfigError if the path `value` of `flag` cannot become a file or directory; None passes.

    This makes the directory, or the file's directory, but not the file.
    """
    if value is None:
        return
    path = nearest = os.path.abspath(value)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    is_nearest_directory = is_directory or nearest != path
    if os.path.isdir(nearest) != is_nearest_directory or not os.access(nearest, os.W_OK):
        kind = "directory" if is_nearest_directory else "file"
        raise ConfigError(f"{flag} {value}: {nearest} is no {kind} that can be written: give another path")
    try:
        os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)
        if not is_directory and not _is_there(path):
            tempfile.TemporaryFile(dir=os.path.dirname(path)).close()  # not the file itself: all ranks do this at once
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {value} cannot be made ({reason}): give another path") from None


def _is_there(path: str) -> bool:
    """Whether the file exists; raises OSError or ValueError if no file can have this name or it is no regular file."""
    if (kind := other_kind(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, through which memo does not write")
    return os.path.lexists(path)


def _check_wandb(project: str) -> None:
    """Raises ConfigError if wandb has no key. It follows wandb's rules but does not import wandb, which would ask for a
    key on a terminal that nobody watches."""
    settings = _wandb_settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode") or "online"
    if mode not in ("online", "shared") or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _is_in_netrc(url)):
        raise ConfigError(
            f"--wandb-project {project} needs a key for {url}, but WANDB_API_KEY is not set and netrc holds none: run "
            "wandb login, or set WANDB_MODE=offline to write to ./wandb and send it later with wandb sync"
        )


def _wandb_settings() -> dict[str, str]:
    """wandb's settings from the user's file, overridden by the file in this directory; unreadable files are skipped."""
    user = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    here = os.environ.get("WANDB_DIR") or "."
    parser = configparser.ConfigParser(interpolation=None)
    for path in (Path(user, "settings"), Path(here, "wandb", "settings")):
        with contextlib.suppress(OSError, ValueError, configparser.Error):
            parser.read(path, encoding="utf-8")
    return dict(parser["default"]) if parser.has_section("default") else {}


def _is_in_netrc(url: str) -> bool:
    host = urlsplit(url).hostname or url
    given = os.environ.get("NETRC")
    for path in [given] if given else [os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")]:
        with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
            if netrc.netrc(path).hosts.get(host) is not None:
                return True
    return False
