"""Lays out the new store of `recode`: is there room, then manifest, plan, tokens and frozen parts.

Safe to kill and repeat: what exists is whole, what is written aside is removed by the next start.
"""

import shutil
from pathlib import Path

import numpy as np

from .. import UserError
from ..progress import bar
from .create import bring, create_store, require_own_folder
from .files import free_bytes, storage_error
from .frozen import CONFIG_PATH, TENSORS_PATH, check_frozen, read_document, require_same_parts
from .geometry import states_bytes
from .index import PLAN_PATH, committed_segments
from .manifest import MANIFEST_NAME, read_manifest, require_same
from .recode_choice import rest_bytes, rows_per_file
from .recode_plan import RecodePlan
from .samples import SampleWriter
from .size import COMMIT_BYTES, PLAN_ROW_BYTES, human_bytes
from .tokens_file import TEXT_COLUMNS

TOKENS_ASIDE = ".tokens"  # token files while they are written; linked into plan/ when whole


def refuse_other_store(plan: RecodePlan) -> None:
    """A store of another identity, or somebody else's folder, is refused before anything is touched."""
    require_own_folder(plan.store_dir, option="--out")
    if (plan.store_dir / MANIFEST_NAME).exists():
        require_same(plan.store_dir, read_manifest(plan.store_dir), plan.manifest, option="--out")


def check_space(plan: RecodePlan) -> None:
    """Refuses a disk that cannot take what is still to write."""
    needed, free = needed_bytes(plan), free_bytes(plan.store_dir)
    if needed > free:
        raise UserError(
            f"the new store needs {human_bytes(needed)} ({needed} bytes) more, "
            f"{plan.config.out!r} has {human_bytes(free)} free",
            "a disk that takes the whole new store",
            "free space, take less with --budget or --taps, or start all the same with --no-space-check",
        )


def refuse_early(plan: RecodePlan) -> None:
    """What can be refused before a new store's folder is made: frozen parts that differ, too little room.

    A store that was started may hold left-overs that count as used space, so its room is looked at later.
    """
    require_frozen(plan)
    if plan.config.space_check and not (plan.store_dir / MANIFEST_NAME).exists():
        check_space(plan)


def needed_bytes(plan: RecodePlan) -> int:
    """Bytes still to write: exact for states (zstd takes less), an upper bound for the small rest."""
    is_laid_out = (plan.store_dir / PLAN_PATH).exists()
    done = committed_segments(plan.store_dir) if is_laid_out else set()
    is_new = ~np.isin(plan.table.column("segment").to_numpy(), sorted(done))
    states = states_bytes(plan.manifest, plan.taken.n[is_new], plan.manifest.num_segments - len(done))
    if is_laid_out:
        return states + COMMIT_BYTES * plan.manifest.num_segments + PLAN_ROW_BYTES * len(plan.taken)
    return states + rest_bytes(plan.sources[0], plan.manifest, plan.taken)


def lay_out_store(plan: RecodePlan) -> None:
    """Manifest, plan, tokens and frozen parts; what is there already stays."""
    out, aside = plan.store_dir, plan.store_dir / TOKENS_ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    if not (out / PLAN_PATH).exists() and not plan.is_linked:
        write_tokens(plan, aside)
    create_store(out, plan.manifest, plan.table, plan.sources[0].store_dir / "plan" if plan.is_linked else aside)
    shutil.rmtree(aside, ignore_errors=True)
    bring_frozen(plan)


def write_tokens(plan: RecodePlan, folder: Path) -> None:
    """The token files of the chosen samples, in the order of the plan."""
    taken, texts = plan.taken, [plan.table.column(name).to_pylist() for name in TEXT_COLUMNS]
    lines = plan.table.column("source_line").to_pylist()
    with SampleWriter(folder, rows_per_file=rows_per_file(taken)) as writer:
        places = zip(taken.source.tolist(), taken.number.tolist(), zip(*texts), lines)
        for source, number, (split, task, name, origin), line in bar("tokens", " samples", places, total=len(taken)):
            ids, mask = plan.sources[source].tokens(number)
            writer.add(ids, mask, split=split, task=task, source=name, source_line=line, origin=origin)
    assert writer.num_files == -(-len(taken) // rows_per_file(taken)), "a token file ended before its number of samples"


def require_frozen(plan: RecodePlan) -> None:
    """Refuses stores whose frozen parts differ, and damaged ones where they are still to be copied."""
    first = plan.sources[0].store_dir
    document = read_document(first / CONFIG_PATH)
    for folder in (*(source.store_dir for source in plan.sources[1:]), plan.store_dir):
        if folder != plan.store_dir or (folder / CONFIG_PATH).exists():
            require_same_parts(folder / CONFIG_PATH, document, read_document(folder / CONFIG_PATH))
    if not (plan.store_dir / CONFIG_PATH).exists():
        check_frozen(first, plan.manifest)


def bring_frozen(plan: RecodePlan) -> None:
    """The frozen parts of the first store, linked or copied."""
    first = plan.sources[0].store_dir
    if (plan.store_dir / CONFIG_PATH).exists():
        return
    try:
        folder = (plan.store_dir / CONFIG_PATH).parent
        folder.mkdir(exist_ok=True)
        for left_over in folder.iterdir():  # of a start that was killed here: config.json comes last
            left_over.unlink()
        for path in (TENSORS_PATH, CONFIG_PATH):
            bring(first / path, plan.store_dir / path)
    except OSError as error:
        raise storage_error(error, plan.store_dir / CONFIG_PATH) from error
