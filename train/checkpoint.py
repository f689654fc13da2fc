"""Checkpoints: folders that appear whole or not at all, which of them stay, and a drafter read back.

A checkpoint holds fp32 weights (`drafter.safetensors`, z-lab names), the optimizer's state
(`optimizer.pt`), and the rest of the loop's state with the checksums of both (`state.json`). This file
knows tensors, names and files; it does not know how a step is made.
"""

import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import UserError, system_reason
from ..store.files import NO_SPACE, free_bytes, fsync_folder, publish, storage_error, temporary_path
from .checkpoint_check import file_checksum, require_drafter, require_masters, require_same_bytes, require_within
from .drafter import Drafter
from .facts import CHECKPOINTS_NAME, TEMPORARY_NAME, RunFacts, read_facts
from .loop_state import LoopState, Unfit, parse_state, state_json
from .metrics import GOES_ON

WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME = "drafter.safetensors", "optimizer.pt", "state.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as safetensors ends the text of an error of the disk
SPARE_BYTES = 1 << 20  # headers and state.json
LATEST, BEST = "latest", "best"
BROKEN = (  # what json, torch and safetensors raise for a file that is not what it was
    *(OSError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, EOFError),
    *(SafetensorError, pickle.UnpicklingError),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds, on the CPU."""

    state: LoopState
    weights: dict[str, Tensor]  # fp32
    optimizer: dict[str, Any]  # MasterOptimizer.state_dict without masters


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS_NAME / f"step-{step:08d}"


def list_steps(run_dir: Path) -> list[int]:
    """The steps of all complete checkpoints, ascending."""
    folder = run_dir / CHECKPOINTS_NAME
    if not folder.is_dir():
        return []
    matches = (STEP_NAME.fullmatch(entry.name) for entry in os.scandir(folder))
    return sorted(int(match[1]) for match in matches if match)


def save(run_dir: Path, state: LoopState, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> Path:
    """Writes a checkpoint aside, syncs it and renames it; returns its folder.

    `weights` are the fp32 masters. Where the step has one, of a run that was told to end before the step's exam, only
    its state is renewed. Raises UserError when the disk is full or fails; earlier checkpoints stay as they are.
    """
    final = checkpoint_dir(run_dir, state.step)
    if final.is_dir():
        publish(final / STATE_NAME, state_json(state, read_checksums(run_dir, state.step)))
        return final
    needed = size_bytes(weights) + size_bytes(optimizer) + SPARE_BYTES
    folder = temporary_path(final)
    try:
        final.parent.mkdir(exist_ok=True)
        require_space(final, needed)
        folder.mkdir()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_NAME)
        with (folder / OPTIMIZER_NAME).open("wb") as file:  # given a path, torch does not say why the disk refused
            torch.save(dict(optimizer), file)
        checksums = {name: file_checksum(folder / name) for name in (WEIGHTS_NAME, OPTIMIZER_NAME)}
        (folder / STATE_NAME).write_bytes(state_json(state, checksums))
        for path in (*folder.iterdir(), folder):
            fsync(path)
        os.rename(folder, final)
        fsync_folder(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise explained(error, final, needed) from error
    return final


def explained(error: Exception, final: Path, needed: int) -> Exception:
    """The UserError for a full or failing disk; any other error as it is."""
    disk = of_disk(error)
    if disk is None:
        return error
    return storage_error(disk, final, needed_bytes=needed, safe=what_is_safe(final.parent.parent))


def of_disk(error: Exception) -> OSError | None:
    """The error of the disk behind one of torch or safetensors, which put their own in its place."""
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    found = OS_ERROR.search(str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


def what_is_safe(run_dir: Path) -> str:
    """From where the same command goes on, for whoever reads of a disk that failed."""
    try:
        steps = list_steps(run_dir)
    except OSError:
        return GOES_ON
    return f"{GOES_ON}, step {steps[-1]}" if steps else "training starts anew: it has no checkpoint yet"


def require_space(final: Path, needed: int) -> None:
    """Raises before a byte is written where the checkpoint cannot fit."""
    if free_bytes(final.parent) < needed:
        raise OSError(NO_SPACE[0], os.strerror(NO_SPACE[0]))


def size_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(size_bytes(item) for item in items)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(run_dir: Path, step: int) -> Checkpoint:
    """The checkpoint of a step. Raises UserError where it cannot be read, or is not what was written."""
    with named_damage(run_dir, step) as folder:
        state, checksums = read_state_file(folder, step)
        for name in (OPTIMIZER_NAME, WEIGHTS_NAME):
            require_same_bytes(folder / name, checksums)
        optimizer = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        weights = load_file(folder / WEIGHTS_NAME)
        require_masters(weights)
        return Checkpoint(state, weights, optimizer)


def read_state(run_dir: Path, step: int) -> LoopState:
    """Where the loop stood. Raises UserError where the file is broken, or of another step."""
    with named_damage(run_dir, step) as folder:
        return read_state_file(folder, step)[0]


def read_checksums(run_dir: Path, step: int) -> dict[str, int] | None:
    """Those of weights and optimizer; None in a checkpoint that an earlier version wrote."""
    with named_damage(run_dir, step) as folder:
        return read_state_file(folder, step)[1]


def read_state_file(folder: Path, step: int) -> tuple[LoopState, dict[str, int] | None]:
    return parse_state((folder / STATE_NAME).read_text(encoding="utf-8"), step)


@contextmanager
def named_damage(run_dir: Path, step: int) -> Iterator[Path]:
    """The folder of a checkpoint; what its reading or its check raises in the block becomes a UserError with its name.

    The block must do nothing else: an error of a device would be taken for one of the files.
    """
    folder = checkpoint_dir(run_dir, step)
    try:
        yield folder
    except (*BROKEN, Unfit) as error:
        raise damaged(folder, error) from error


def damaged(folder: Path, error: Exception) -> UserError:
    reason = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
    return UserError(
        f"checkpoint {str(folder)!r} cannot be read: {reason}".replace("\n", " "),
        f"a folder with {WEIGHTS_NAME}, {OPTIMIZER_NAME} and {STATE_NAME}, as the run wrote them",
        "copy it again, or remove the folder to go back to the checkpoint before it",
    )


def prune(run_dir: Path, keep: int, best_step: int | None) -> None:
    """Removes all checkpoints but the newest `keep` and the best."""
    for step in list_steps(run_dir)[:-keep]:
        if step != best_step:
            remove(checkpoint_dir(run_dir, step))


def remove(folder: Path) -> None:
    """Removes a checkpoint; it leaves its final name first, so that no half of it is ever one."""
    aside = temporary_path(folder)
    try:
        os.rename(folder, aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise not_removed(error, folder, folder.parent.parent) from error


def not_removed(error: OSError, path: Path, run_dir: Path) -> UserError:
    return UserError(
        f"{str(path)!r} cannot be removed: {system_reason(error)}",
        "a folder whose files nobody else holds, on a disk that may be written to",
        f"check mount and rights, then give the same command again; {what_is_safe(run_dir)}",
    )


def remove_temporaries(run_dir: Path) -> list[Path]:
    """Removes what killed trainers left in RUN; whoever calls this holds the lock of the run.

    Raises UserError for what cannot be removed.
    """
    removed = []
    own = [checkpoint_dir(run_dir, step) for step in list_steps(run_dir)]
    for folder in (run_dir, run_dir / CHECKPOINTS_NAME, *own):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if TEMPORARY_NAME.fullmatch(path.name):
                try:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                except OSError as error:
                    raise not_removed(error, path, run_dir) from error
                removed.append(path)
    return removed


def find_best(run_dir: Path) -> int | None:
    """The step of the best checkpoint; None before an exam had something to measure."""
    steps = list_steps(run_dir)
    best = read_state(run_dir, steps[-1]).best_step if steps else None
    return best if best in steps else None


def find_step(run_dir: Path, which: str) -> int:
    """The step of the `latest` or `best` checkpoint, or of the number given.

    Raises UserError where there is no run, and, listing what is there, for any other checkpoint.
    """
    steps = list_steps(run_dir)
    if not steps:
        read_facts(run_dir)  # a folder that is no run is another fault than a run without checkpoints
    if steps and which == LATEST:
        return steps[-1]
    if which == BEST and (best := find_best(run_dir)) is not None:
        return best
    if which.isdecimal() and int(which) in steps:
        return int(which)
    there = f"steps {', '.join(map(str, steps))}" if steps else "none yet"
    raise UserError(
        f"no checkpoint {which!r} in {str(run_dir)!r}",
        f"{LATEST}, {BEST} (after an exam with held-out samples) or a step number; there are: {there}",
        "name one of these with --checkpoint, or train on",
    )


def load_drafter(
    run_dir: Path, which: str, device: torch.device | str, dtype: torch.dtype | None = None
) -> tuple[Drafter, RunFacts]:
    """A trained drafter in evaluation mode and the facts of its run; `dtype` None is the run's own."""
    facts = read_facts(run_dir)
    step = find_step(run_dir, which)
    drafter = Drafter(facts.spec)
    with named_damage(run_dir, step) as folder:
        state, checksums = read_state_file(folder, step)
        require_within(state, facts.steps)
        require_same_bytes(folder / WEIGHTS_NAME, checksums)
        weights = load_file(folder / WEIGHTS_NAME)
        require_masters(weights)
        require_drafter(weights, drafter)
        drafter.load_state_dict(weights)
    return drafter.to(device, dtype or getattr(torch, facts.dtype)).eval(), facts
