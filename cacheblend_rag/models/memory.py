"""How much memory there is, and how much this process may still take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of a control group of either version: its folder, limit, use, and files kept in memory that give way.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could take if nothing else ran: of the machine, or of its narrowest control group.

    Returns
    -------
    int or None
        None where the system does not say; only Linux does.
    """
    total = _numbers(proc / "meminfo").get("MemTotal")
    if total is None:
        return None
    return min([1024 * total, *(limit for limit, _ in _limits(proc / "self" / "cgroup", groups))])


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that are free on the machine and within the process's control groups.

    Returns
    -------
    int or None
        None where the system does not say; only Linux does.
    """
    available = _numbers(proc / "meminfo").get("MemAvailable")
    if available is None:
        return None
    return max(0, min([1024 * available, *(left for _, left in _limits(proc / "self" / "cgroup", groups))]))


def free_memory_on(device: torch.device) -> int | None:
    """Bytes that tensors may still take on a device, what PyTorch keeps there for later included; None if unknown."""
    if device.type == "cpu":
        return free_memory()
    if device.type != "cuda":
        return None

    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _limits(own: Path, groups: Path) -> list[tuple[int, int]]:
    """The limit of each control group that sets one, and what is left of it."""
    found = []
    for row in (line.split(":", 2) for line in _text(own).splitlines()):
        if len(row) < 3:
            continue
        _, controllers, path = row
        form = _V2 if not controllers else _V1 if "memory" in controllers.split(",") else None
        if form is None:
            continue
        root, limit, use, inactive = form
        below = Path(path.strip("/"))
        # A limit may be set at any level; within a container the group's path is that of another root.
        for folder in {groups / root / part for part in (below, *below.parents)}:
            most, used = _number(folder / limit), _number(folder / use)
            if most is not None and used is not None:
                found.append((most, most - used + _numbers(folder / "memory.stat").get(inactive, 0)))
    return found


def _numbers(path: Path) -> dict[str, int]:
    """Rows of a name and a number."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the machine."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
