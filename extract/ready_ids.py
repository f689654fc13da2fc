"""A user's own table of token ids as `--data`: prepared beside the store, by `prepare` itself.

One owner of the rules: which rows are used, cut or left out, and how that is counted, is `prepare`'s to say, with its
defaults. Here is only what is such a table, where its samples go, and that one process at a time makes them.
"""

import os
from pathlib import Path

from .. import UserError
from ..progress import say
from ..store.create import require_own_folder
from ..store.files import FolderLock, disk_errors, make_folder
from .config import ExtractConfig, PrepareConfig
from .data import DATA_NAME, require_outside
from .lines.dataset_folders import is_dataset

LOCK_WAIT_S = 7200.0  # for another node to prepare them
TABLES = ("dataset", "parquet", "arrow")
IDS = "input_ids"


def ready_data(config: ExtractConfig, *, is_read_only: bool = False) -> Path:
    """The DATA folder to extract from: `config.data`, or what its table of token ids was prepared into.

    Raises UserError for a store in somebody else's folder or in the table's own, for a table without `--target`, and
    with `is_read_only` for one that is not prepared yet.
    """
    given = Path(config.data)
    require_own_folder(Path(config.store))
    if (given / DATA_NAME).exists() or not has_ids(given):
        return given
    folder = prepared_folder(config)
    require_outside(folder, [config.data], option="--store")
    if config.target is None:
        raise UserError(
            f"{config.data!r} holds token ids, and --target is not given",
            "the target whose tokenizer made them",
            "give --target",
        )
    own = PrepareConfig(target=config.target, out=str(folder))
    if is_read_only and not (folder / DATA_NAME).exists():
        raise UserError(
            f"{config.data!r} holds token ids that are not prepared yet, and plan writes nothing",
            f"samples in {str(folder)!r}",
            f"`dflash prepare {config.data} --target {config.target} --out {folder}`, then plan again; "
            "`dflash extract` does both",
        )
    from .prepare import prepare

    with disk_errors(folder.parent):
        make_folder(folder.parent)
    with FolderLock(folder.parent, name=f".{folder.name}.lock", wait_s=LOCK_WAIT_S):
        made = prepare(own, [config.data])
    num_used, num_in = made.counts["lines_used"], made.counts["lines_in"]
    say(f"token ids in {config.data} prepared into {folder}: {num_used:,} used, {num_in - num_used:,} left out")
    for line in made.text().splitlines()[1:-1]:  # without its name and its next command
        say(f"  {line}")
    return folder


def prepared_folder(config: ExtractConfig) -> Path:
    """Where the samples of a table go: `STORE-data`, beside the store. Raises UserError for a store without a name."""
    store = Path(config.store)
    if store.name in ("", ".."):
        store = Path(os.path.abspath(store))
    if not store.name:
        raise UserError(
            f"store = {config.store!r} has no name, and {config.data!r} holds token ids",
            "a folder beside which they can be prepared",
            "give another --store",
        )
    return store.with_name(f"{store.name}-data")


def has_ids(path: Path) -> bool:
    """True for Arrow or Parquet files, or a saved dataset, whose first file has a column of token ids.

    Raises UserError for a saved dataset or a file of a known format that cannot be read.
    """
    from .lines.files_found import kind_of_name
    from .lines.inputs import find_sources, known_kind, source_files

    if not path.exists():
        return False
    try:
        source = find_sources([str(path)])[0]
        kind, _ = known_kind(source)
        return kind in TABLES and IDS in column_names(source_files(source)[0], kind)
    except UserError:
        if is_dataset(path) or (path.is_file() and kind_of_name(path)):
            raise
        return False  # nothing that is read: whoever wants DATA says what is wrong


def column_names(path: Path, kind: str) -> list[str]:
    if kind == "parquet":
        from .lines.tables import parquet_file

        with parquet_file(path) as table:
            return table.schema_arrow.names
    from .lines.arrow_file import ArrowFile

    with ArrowFile(path) as file:
        return file.schema.names
