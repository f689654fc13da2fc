"""Lays out an empty store: manifest, plan, tokens, array metadata. Safe to kill and repeat.

The manifest comes first and claims the folder for one identity; everything after it either exists
whole or not at all, so the same call completes what a killed one left. Kept apart from `writer`,
which fills segments and needs none of this.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa

from .. import UserError
from .files import FolderLock, NewFile, fsync_folder, make_folder, publish, storage_error, temporary_path
from .geometry import array_geometries
from .index import (
    COMMITS_FOLDER,
    LAYOUT_LOCK,
    LAYOUT_WAIT_S,
    PLAN_PATH,
    check_plan,
    columns,
    plan_sha256,
    write_plan,
)
from .links import plan_links
from .manifest import MANIFEST_NAME, Manifest, read_manifest, require_same, write_manifest
from .tokens_file import tokens_name, tokens_paths

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
TEMPORARIES = ("zarr.json.tmp.*", "*/zarr.json.tmp.*", "plan/*.tmp.*")  # of the files written here


def create_store(store_dir: Path, manifest: Manifest, plan_table: pa.Table, samples_folder: Path) -> None:
    """Makes the store, completes a half-made one, or finds it complete; otherwise refuses.

    The token files of `samples_folder` are hard-linked where the file system can, else copied.
    Raises UserError, with the settings that differ and both values, where the folder is another
    store; where it holds other files; and when the disk fails. Raises ValueError for a plan that
    breaks the format or does not fit the manifest.
    """
    store_dir, samples_folder = Path(store_dir), Path(samples_folder)
    require_fitting(manifest, plan_table)
    if (store_dir / MANIFEST_NAME).exists():
        require_same(store_dir, read_manifest(store_dir), manifest)
    require_own_folder(store_dir)
    try:
        make_folder(store_dir)
        with FolderLock(store_dir, name=LAYOUT_LOCK, wait_s=LAYOUT_WAIT_S):
            lay_out(store_dir, manifest, plan_table, samples_folder)
    except OSError as error:
        raise storage_error(error, store_dir) from error


def lay_out(store_dir: Path, manifest: Manifest, plan_table: pa.Table, samples_folder: Path) -> None:
    """Writes what is missing, in an order in which every prefix is a store of this identity."""
    if (store_dir / MANIFEST_NAME).exists():
        require_same(store_dir, read_manifest(store_dir), manifest)
    else:
        write_manifest(store_dir, manifest)
    arrays = array_geometries(manifest)
    for name in ("plan", COMMITS_FOLDER, *arrays):
        (store_dir / name).mkdir(exist_ok=True)
    fsync_folder(store_dir)
    for pattern in TEMPORARIES:
        for left_over in store_dir.glob(pattern):
            left_over.unlink()
    for name, geometry in arrays.items():
        if not (store_dir / name / MANIFEST_NAME).exists():
            publish(store_dir / name / MANIFEST_NAME, (json.dumps(geometry.array_json(), indent=2) + "\n").encode())
    place_tokens(store_dir / "plan", plan_table, samples_folder)
    if not (store_dir / PLAN_PATH).exists():
        write_plan(store_dir, plan_table, manifest.segment_positions, plan_links(store_dir))


def require_fitting(manifest: Manifest, plan_table: pa.Table) -> None:
    """Raises ValueError where plan and manifest contradict each other or the format."""
    check_plan(plan_table, manifest.segment_positions, manifest.num_segments)
    facts = {
        "num_samples": (manifest.num_samples, plan_table.num_rows),
        "num_positions": (manifest.num_positions, int(columns(plan_table)["n"].sum())),
        "the largest first": (0, int(columns(plan_table)["first"].max(initial=0)) if manifest.window is None else 0),
        "plan_sha256": (manifest.plan_sha256, plan_sha256(plan_table, manifest.segment_positions)),
    }
    wrong = [f"{name} is {said}, the plan has {is_}" for name, (said, is_) in facts.items() if said != is_]
    if wrong:
        raise ValueError(f"manifest and plan differ: {'; '.join(wrong)}")


def require_own_folder(store_dir: Path, *, option: str = "--store") -> None:
    """Refuses a folder with other people's files in it; hidden files and temporaries do not count.

    Refuses a link to nothing, too: no folder can be made in its place.
    """
    for place in (store_dir, *store_dir.parents):
        if place.is_symlink() and not place.exists():
            raise UserError(
                f"{str(place)!r} is a link to {os.readlink(place)!r}, where nothing is",
                "a folder for the store, or a link to one",
                f"make that folder, remove the link, or choose another {option}",
            )
    if store_dir.exists() and not store_dir.is_dir():
        raise UserError(f"{str(store_dir)!r} is a file", "a folder for the store", f"choose another {option}")
    if not store_dir.exists():
        return
    ours = (".", f"{MANIFEST_NAME}.tmp.", "lost+found")  # the last one lies on every fresh disk
    foreign = sorted(name for name in os.listdir(store_dir) if not name.startswith(ours))
    # Looked for after the listing: another launcher may lay the store out meanwhile, and its manifest comes first.
    if foreign and not (store_dir / MANIFEST_NAME).exists():
        raise UserError(
            f"{str(store_dir)!r} holds {foreign[0]!r} and is no store",
            "a new or empty folder, or a store made with the same settings",
            f"choose another folder with {option}, or empty this one",
        )


def place_tokens(plan_dir: Path, plan_table: pa.Table, samples_folder: Path) -> None:
    """Brings every token file into the store; the plan names them by number."""
    there = tokens_paths(samples_folder)
    own = tokens_paths(plan_dir)
    used = columns(plan_table)["tokens_file"]
    num_files = max(len(there), int(used.max(initial=-1)) + 1)
    for number in range(num_files):
        if number in own:
            continue
        if number not in there:
            raise UserError(
                f"{str(samples_folder / tokens_name(number))!r} does not exist, the plan needs it",
                "the folder of samples the plan was made from",
                "check --data, or run `dflash prepare` again",
            )
        bring(there[number], plan_dir / tokens_name(number))


def bring(source: Path, path: Path) -> None:
    """Links `source` to `path`, or copies it where links cannot be; whole or not at all."""
    temporary = temporary_path(path)
    try:
        os.link(source.resolve(), temporary)  # never a link to a link
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        with source.open("rb") as reader, NewFile(path) as file:
            shutil.copyfileobj(reader, file, 1 << 22)
        return
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fdatasync(fd)  # a copy of the samples may be on no disk yet, and the store outlives it
    finally:
        os.close(fd)
    os.replace(temporary, path)
    fsync_folder(path.parent)
