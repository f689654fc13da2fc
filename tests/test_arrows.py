"""The arrows of the house: cli, demo, doctor -> extract | train -> store; leaves for everybody."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("store", "extract", "train")
LEAVES = {
    "__init__",
    "channel",
    "pinned_memory",
    "progress",
    "settings",
    "settings_text",
    "signals",
    "threads",
    "toml_file",
    "watch",
}
OWN_NAMES = {"UserError", "__version__", "errno_name", "system_reason"}
TORCH_FREE = ["train/packing.py", "train/slot.py", "train/loader.py", "extract/targets/base.py"]
TORCH_FREE += ["extract/prepare.py", "extract/work.py", "extract/pool.py", "extract/regenerate/run.py"]


def modules() -> list[Path]:
    found = [*ROOT.glob("*.py")]
    for room in ("commands", *ROOMS):
        found += (ROOT / room).rglob("*.py")
    return sorted(p.relative_to(ROOT) for p in found)


def imported(module: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted paths below the package that a module imports, and outside packages as 'ext:NAME'."""
    tree = ast.parse((ROOT / module).read_text())
    body = tree.body if top_level_only else list(ast.walk(tree))
    package = list(module.parts[:-1])
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {f"ext:{alias.name.split('.')[0]}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(f"ext:{(node.module or '').split('.')[0]}")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            path = [*base, *(node.module.split(".") if node.module else [])]
            names = {".".join([*path, alias.name]) for alias in node.names}
            found |= {n for n in names if not path or is_module(n)} or {".".join(path)}
    return found


def is_module(dotted: str) -> bool:
    path = ROOT / Path(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def room_of(path: str) -> str:
    head = path.split(".")[0]
    return head if head in ROOMS else "root"


def arrows(module: Path) -> set[str]:
    return {name for name in imported(module) if not name.startswith("ext:")}


def forbidden(module: Path, target: str) -> str | None:
    """Why this import is not allowed, or None."""
    source, room = module.as_posix(), room_of(target)
    own = module.parts[0] if len(module.parts) > 1 else "root"
    leaf = room == "root" and (target.split(".")[0] in LEAVES or target in OWN_NAMES)
    if leaf:
        return None
    if source in ("cli.py", "demo.py", "doctor.py") or own == "commands":
        return None
    if own == "root":
        return "a leaf imports nothing of ours but the package's own names"
    if room == "root":
        return "rooms do not import the front door"
    if own == "store" and room != "store":
        return "store knows no other room"
    if {own, room} == {"extract", "train"}:
        return "extract and train do not know each other"
    if source.startswith("extract/targets/") and room == "store":
        return "targets do not know the store"
    if source.startswith("extract/lines/") and not target.startswith(("extract.lines", "extract.origins")):
        return "input lines are read without any model, template or store"
    if source.startswith("extract/chats/") and not target.startswith(
        ("extract.chats", "extract.lines", "extract.targets")
    ):
        return "chats know lines and the text side of a target"
    stem = module.stem
    if (
        own == "train"
        and room == "store"
        and stem
        in {
            "blocks",
            "drafter",
            "loss",
            "objectives",
            "slot_weights",
            "spec",
            "step",
        }
    ):
        return "the mathematics does not know the store"
    if source == "train/loader.py" and target.split(".")[-1] in {"step", "drafter"}:
        return "the loader never imports drafter or step"
    return None


@pytest.mark.parametrize("module", modules(), ids=str)
def test_every_import_follows_the_arrows(module: Path) -> None:
    wrong = {target: why for target in arrows(module) if (why := forbidden(module, target))}
    assert not wrong


def test_the_rule_can_fail() -> None:
    assert forbidden(Path("store/reader.py"), "train.loop")
    assert forbidden(Path("extract/worker.py"), "train.config")
    assert forbidden(Path("extract/targets/hf.py"), "store.frozen")
    assert forbidden(Path("extract/lines/shapes.py"), "extract.targets.facts")
    assert forbidden(Path("extract/chats/chat.py"), "extract.prepare")
    assert forbidden(Path("train/loss.py"), "store.reader")
    assert forbidden(Path("train/loader.py"), "train.step")
    assert forbidden(Path("watch.py"), "settings") is None
    assert forbidden(Path("watch.py"), "store.files")
    assert forbidden(Path("train/loop.py"), "cli")
    assert forbidden(Path("train/loop.py"), "commands.training")
    assert forbidden(Path("commands/training.py"), "extract.questions") is None


def reached_on_import(module: Path, seen: set[Path]) -> set[str]:
    """Outside packages that importing a module brings in through our own modules."""
    if module in seen:
        return set()
    seen.add(module)
    found: set[str] = set()
    for name in imported(module, top_level_only=True):
        if name.startswith("ext:"):
            found.add(name[4:])
            continue
        path = Path(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / candidate).is_file():
                found |= reached_on_import(candidate, seen)
    return found


@pytest.mark.parametrize("module", [*TORCH_FREE, *(f"store/{p.name}" for p in sorted((ROOT / "store").glob("*.py")))])
def test_the_loader_side_is_free_of_torch(module: str) -> None:
    heavy = reached_on_import(Path(module), set()) & {"torch", "transformers", "triton"}
    assert not heavy


@pytest.mark.parametrize(
    "module",
    [
        "cli.py",
        "options.py",
        "settings.py",
        "watch.py",
        "extract/config.py",
        "store/config.py",
        "train/config.py",
        "train/evaluate/config.py",
        "train/export/config.py",
        "train/sweep/config.py",
        "train/serve_check/config.py",
    ],
)
def test_the_front_door_is_light(module: str) -> None:
    heavy = reached_on_import(Path(module), set()) & {"torch", "transformers", "numpy", "pyarrow", "zarr", "matplotlib"}
    assert not heavy


def test_no_relative_import_leaves_the_package_by_absolute_name() -> None:
    for module in modules():
        assert "ext:dflash_offline" not in imported(module), f"{module} imports the package by its absolute name"
