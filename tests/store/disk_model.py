"""A disk that forgets: replays recorded system calls and gives what a power cut may leave of them.

Knows no store. POSIX promises the data of a file after fsync or fdatasync of it, and a name after fsync of its folder;
everything else may be there or not. Only the disk is simulated here, the code that writes runs as it is.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BLOCK = 4096
Call = tuple[Any, ...]


@dataclass
class File:
    """What programs see of a file, and what is on the disk for certain."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def write(self, offset: int, data: bytes) -> None:
        self.now.extend(b"\0" * (offset - len(self.now)))
        self.now[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        del self.now[size:]
        self.now.extend(b"\0" * (size - len(self.now)))

    def left(self, data: str) -> bytes:
        """The content after a cut: `lost` and `zeros` as POSIX allows, `kept` by good luck, `torn` by blocks."""
        synced = self.synced[: len(self.now)].ljust(len(self.now), b"\0")
        if data == "lost" or bytes(self.now) == self.synced:
            return self.synced
        if data == "torn":
            starts = range(0, len(self.now), BLOCK)
            return b"".join(bytes((self.now, synced)[s // BLOCK % 2][s : s + BLOCK]) for s in starts)
        return synced if data == "zeros" else bytes(self.now)


@dataclass
class Folder:
    """Names now, and those on the disk for certain; `pending` are the changes in between, oldest first."""

    now: dict[str, "File | Folder"] = field(default_factory=dict)
    synced: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[dict[str, "File | Folder | None"]] = field(default_factory=list)

    def change(self, **names: "File | Folder | None") -> None:
        self.pending.append(names)
        self.now = apply(self.now, [names])

    def sync(self) -> None:
        self.synced, self.pending = dict(self.now), []

    def folders(self) -> Iterator["Folder"]:
        """This folder and all below it, those of any moment."""
        yield self
        nodes = [self.synced, self.now, *self.pending]
        for child in {
            id(node): node for names in nodes for node in names.values() if isinstance(node, Folder)
        }.values():
            yield from child.folders()


def apply(names: dict[str, Any], changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    result = dict(names)
    for change in changes:
        result |= change
    return {name: node for name, node in result.items() if node is not None}


class Disk:
    """Replays recorded calls; `left` gives the trees that may be found after a cut."""

    def __init__(self, start: dict[str, bytes], *, is_synced: bool = True) -> None:
        self.root = Folder()
        self.open_files: dict[int, File | Folder] = {}
        for name, data in start.items():
            *folders, own = name.split("/")
            place = self.root
            for folder in folders:
                place = place.now.setdefault(folder, Folder())
                assert isinstance(place, Folder)
            place.now[own] = File(bytearray(data), data if is_synced else b"")
        for folder in list(self.root.folders()):
            folder.sync()

    def place(self, path: str) -> tuple[Folder, str]:
        *folders, own = path.split("/")
        place: Any = self.root
        for folder in folders:
            place = place.now[folder]
        return place, own

    def find(self, path: str) -> Any:
        folder, name = self.place(path)
        return folder.now[name] if name else folder

    def play(self, call: Call) -> None:
        match call:
            case ("open", path, fd, flags):
                folder, name = self.place(path)
                if name and name not in folder.now:
                    folder.change(**{name: File()})
                self.open_files[fd] = node = self.find(path)
                if flags & os.O_TRUNC:
                    node.truncate(0)
            case ("write", fd, offset, data):
                node: Any = self.open_files[fd]
                node.write(len(node.now) if offset is None else offset, data)
            case ("truncate", fd, size):
                node = self.open_files[fd]
                node.truncate(size)
            case ("sync", fd):
                node = self.open_files[fd]
                if isinstance(node, Folder):
                    node.sync()
                else:
                    node.synced = bytes(node.now)
            case ("rename", old, new):
                (folder, old_name), (other, new_name) = self.place(old), self.place(new)
                assert folder is other
                folder.change(**{new_name: folder.now[old_name], old_name: None})
            case ("link", old, new):
                folder, name = self.place(new)
                folder.change(**{name: self.find(old)})
            case ("unlink", path):
                folder, name = self.place(path)
                folder.change(**{name: None})
            case ("mkdir", path):
                folder, name = self.place(path)
                folder.change(**{name: Folder()})

    def left(self, data_kinds: Sequence[str], *, together: bool = False) -> Iterator[dict[str, bytes]]:
        """Every tree after a cut: in each folder any first part of the unsynced changes, and each kind of data.

        `together`: all of the unsynced changes in all folders, or none of them.
        """
        folders = list({id(folder): folder for folder in self.root.folders()}.values())
        pending = [len(folder.pending) for folder in folders]
        every = itertools.product(*(range(count + 1) for count in pending))
        for counts in [[0] * len(pending), pending] if together else every:
            kept = {id(folder): count for folder, count in zip(folders, counts)}
            for data in data_kinds:
                yield dict(self.tree(self.root, "", kept, data))

    def tree(self, folder: Folder, prefix: str, kept: dict[int, int], data: str) -> Iterator[tuple[str, bytes]]:
        for name, node in apply(folder.synced, folder.pending[: kept[id(folder)]]).items():
            if isinstance(node, File):
                yield prefix + name, node.left(data)
            else:
                yield prefix + name + "/", b""
                yield from self.tree(node, f"{prefix}{name}/", kept, data)


class Recorder:
    """Notes the calls of this process that change files below `world`, in their order, and lets them happen."""

    def __init__(self, world: Path, patch: pytest.MonkeyPatch) -> None:
        self.world = str(world.resolve())
        self.calls: list[Call] = []
        self.fds: set[int] = set()
        for name in ("open", "close", "write", "writev", "pwrite", "ftruncate", "fsync", "fdatasync"):
            patch.setattr(os, name, self.of_descriptor(name, getattr(os, name)))
        for name in ("replace", "rename", "link", "unlink", "remove", "mkdir"):
            patch.setattr(os, name, self.of_names(name, getattr(os, name)))

    def inside(self, path: Any) -> str | None:
        absolute = os.path.abspath(os.fspath(path)) if not isinstance(path, int) else ""
        return absolute[len(self.world) + 1 :] if (absolute + "/").startswith(self.world + "/") else None

    def of_descriptor(self, name: str, call: Callable) -> Callable:
        def recorded(first: Any, *rest: Any, **options: Any) -> Any:
            result = call(first, *rest, **options)
            if name == "open":
                path = self.inside(first)
                if path is not None:
                    self.fds.add(result)
                    self.calls.append(("open", path, result, rest[0]))
            elif first in self.fds:
                self.note(name, first, rest, result)
            return result

        return recorded

    def note(self, name: str, fd: int, rest: tuple, result: Any) -> None:
        if name == "close":
            self.fds.remove(fd)
        elif name in ("fsync", "fdatasync"):
            self.calls.append(("sync", fd))
        elif name == "ftruncate":
            self.calls.append(("truncate", fd, rest[0]))
        else:
            data = b"".join(rest[0]) if name == "writev" else bytes(rest[0])
            self.calls.append(("write", fd, rest[1] if name == "pwrite" else None, data[:result]))

    def of_names(self, name: str, call: Callable) -> Callable:
        kind = {"replace": "rename", "remove": "unlink"}.get(name, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            paths = [self.inside(path) for path in arguments[: 2 if kind in ("rename", "link") else 1]]
            if all(path is not None for path in paths):
                self.calls.append((kind, *paths))
            return result

        return recorded
