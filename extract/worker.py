"""One worker of `extract`: loads the target and records groups of segments.

Runs in a process of its own under `watch`. It asks its launcher for work and never decides
what to do next; what it is asked to do gives the same bytes whoever does it.
"""

from pathlib import Path

from ..store.manifest import read_manifest
from ..watch import Channel
from .dealing import Group, Note, Order, WantsFrozenWork, WantsGroup
from .devices import single_devices
from .same_target import require_same_target
from .writing import WriterProcess


def work(channel: Channel, order: Order) -> None:
    """A worker's life. Raises UserError for a target that changed or is unsound, or a full disk."""
    import torch

    from .recorder import Recorder
    from .targets.hf import load_target

    store_dir = Path(order.store_dir)
    manifest = read_manifest(store_dir)
    first, *beside = single_devices(order.device)
    if order.device == "cpu":
        torch.set_num_threads(order.cpu_threads)
    else:
        torch.cuda.set_device(first)
    target = load_target(order.target, device=first, dtype=manifest.target["dtype"], beside=beside)
    require_same_target(manifest, target.facts.as_plain())
    if not order.slow_kernels:
        target.require_fast_kernels()
    if target.kernel_note:
        channel.tell(Note(target.kernel_note))
    if channel.ask(WantsFrozenWork(), order.stall_s):
        from ..store.frozen import write_frozen

        parts, _ = target.frozen()
        write_frozen(store_dir, parts, manifest.target)  # these facts, of which an older store has fewer
    recorder = Recorder(channel, order, manifest, target)
    slot_bytes = recorder.largest_batch_bytes()
    with WriterProcess(channel, store_dir, slot_bytes=slot_bytes, device=first, stall_s=order.stall_s) as writer:
        while (group := channel.ask(WantsGroup(), order.stall_s)) is not None:
            assert isinstance(group, Group)
            recorder.record(group, writer)
        writer.finish()
