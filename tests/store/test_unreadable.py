"""Files that are there and cannot be read: each is named, with what the system says."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from dflash_offline import UserError
from dflash_offline.store.frozen import read_document
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.state_error import measured_error

READ = "/proc/self/mem"  # an ordinary file whose first byte gives EIO to whoever reads it


@pytest.mark.parametrize(
    "name, source, code, read",
    [
        ("zarr.json", READ, "EIO", StoreReader),
        ("hidden/zarr.json", READ, "EIO", StoreReader),
        ("plan/tokens-00000.arrow", READ, "EIO", StoreReader),
        ("plan/index.arrow", "/dev", "EINVAL|ENODEV", StoreReader),
        ("commits/00000000.arrow", "/dev", "EINVAL|ENODEV", StoreReader),
        ("state_errors.json", READ, "EIO", measured_error),
        ("frozen/config.json", READ, "EIO", lambda store_dir: read_document(store_dir / "frozen/config.json")),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, small: ModuleType, name: str, source: str, code: str, read: Callable[[Path], object]
) -> None:
    store_dir, _, _ = small.make_store(tmp_path, 5)
    (store_dir / name).parent.mkdir(exist_ok=True)
    (store_dir / name).unlink(missing_ok=True)
    (store_dir / name).symlink_to(source)
    with pytest.raises(UserError, match=rf"{name}' failed: .*\(({code})\)") as caught:
        read(store_dir)
    assert len(str(caught.value).splitlines()) == 3
