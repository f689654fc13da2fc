"""What ties the files of a store together, so that one of them from elsewhere is noticed when the store is opened.

Each file has its own checksum, which a whole file of another store of the same shape passes too. The plan's
metadata therefore names the manifest and every token file, the manifest the plan's hash, commits and `index.arrow` the
manifest's identity and the checksums of the states, `frozen/config.json` those of its tensors. Array metadata follows
from the manifest.
"""

import json
from pathlib import Path

import pyarrow as pa

from .. import UserError
from .arrow_file import damaged
from .files import unreadable
from .geometry import array_geometries
from .index import PLAN_PATH
from .manifest import MANIFEST_NAME, Manifest, checksum, read_manifest
from .tokens_file import file_checksum, tokens_paths

MANIFEST_KEY, TOKENS_KEY = "manifest_sha256", "tokens_crc32c"


def plan_links(store_dir: Path) -> dict[str, str]:
    """What the plan's metadata says of manifest and token files, which are there already."""
    manifest = read_manifest(store_dir)
    tokens = [file_checksum(path) for path in tokens_paths(Path(store_dir) / "plan").values()]
    return {MANIFEST_KEY: checksum(manifest.as_json()), TOKENS_KEY: json.dumps(tokens)}


def require_linked(store_dir: Path, manifest: Manifest, plan: pa.Table) -> None:
    """Raises UserError where manifest, token files or array metadata are not those the store was made with."""
    require_own_manifest(store_dir, manifest, plan)
    require_own_tokens(store_dir, plan)
    for array in array_geometries(manifest):
        require_array_metadata(store_dir, manifest, array)


def require_own_manifest(store_dir: Path, manifest: Manifest, plan: pa.Table) -> None:
    """Raises UserError where the manifest is not the one that the plan was written beside."""
    if checksum(manifest.as_json()) != link(plan, MANIFEST_KEY):
        raise damaged(Path(store_dir) / MANIFEST_NAME, f"it is not the one that {PLAN_PATH} names")


def require_own_tokens(store_dir: Path, plan: pa.Table) -> None:
    """Raises UserError for the first token file that is not the one the plan names; missing ones are passed over."""
    paths = tokens_paths(Path(store_dir) / "plan")
    for number, digits in enumerate(json.loads(link(plan, TOKENS_KEY))):
        if number in paths and file_checksum(paths[number]) != digits:
            raise damaged(paths[number], f"it is not the file that {PLAN_PATH} names")


def link(plan: pa.Table, key: str) -> str:
    """One of the links in the metadata of a plan as it was read."""
    value = (plan.schema.metadata or {}).get(key.encode())
    if value is None:
        raise damaged(Path(PLAN_PATH), f"its metadata holds no {key}")
    return value.decode()


def require_array_metadata(store_dir: Path, manifest: Manifest, array: str) -> None:
    """Raises UserError unless the array's `zarr.json` is the one that the manifest describes."""
    path = Path(store_dir) / array / MANIFEST_NAME
    try:
        is_same = json.loads(path.read_bytes()) == array_geometries(manifest)[array].array_json()
    except FileNotFoundError as error:
        raise UserError(f"{str(path)!r} does not exist", "a complete store", "run the same extract again") from error
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError:
        is_same = False
    if not is_same:
        raise damaged(path, "it is not the array that the manifest describes")
