"""Limits a process sets itself before it touches what strangers made.

Time and memory are limited on every POSIX system. On Linux system calls are filtered (seccomp), so that there is no
network, no writing, no other program and no signal. Where the kernel has Landlock, nothing is read but code.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import site
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Files that one process may parse, at most, each as long as one may take.
_FILES = 64
# How much its priority is lowered: answers go before parsing and compiling.
_BEHIND = 10

# Numbers of system calls on x86-64 and on 64-bit ARM, which lacks some.
_REFUSED = {
    # network, and ways around the rest
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "bpf": (321, 280), "keyctl": (250, 219), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51),
    # other programs and processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "clone": (56, 220),
    "clone3": (435, 435), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "ptrace": (101, 117),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "prlimit64": (302, 261),
    # changes to files
    "creat": (85, None), "openat2": (437, 437), "open_by_handle_at": (304, 265), "mq_open": (240, 180),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45),
    "ftruncate": (77, 46), "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
}  # fmt: skip
# Opening is refused for anything but reading; the place of the flags among the arguments.
_OPENING = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# The kernel's names of the machines, and its number for the call that sets a filter.
_MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}

# Instructions of the filter: load a word, compare, test bits, return.
_LOAD, _EQUALS, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NO_NEW_PRIVILEGES = 38
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


def isolated(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` that run ``main`` of a module in a process without environment and folder.

    Parameters
    ----------
    module : str
    arguments : sequence of str
        Of ``main``.
    """
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from importlib import import_module; "
        f"sys.exit(import_module({module!r}).main(sys.argv[2:]))"
    )
    # -I: nothing of the environment or the working folder is used. What is imported comes from the same places as here.
    flags, places = ("-I", "-X", "utf8", "-W", "ignore"), json.dumps([one for one in sys.path if one])
    return {
        "args": [sys.executable, *flags, "-c", program, places, *arguments],
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        # Without this one Windows starts nothing.
        "env": {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},
        "cwd": os.path.abspath(os.sep),
    }


def confine(memory: int, seconds: float, files: int = _FILES) -> frozenset[str]:
    """Hold this process within limits, for good.

    Parameters
    ----------
    memory : int
        Bytes.
    seconds : float
        Of one file.
    files : int
        How many there may be.

    Returns
    -------
    frozenset of str
        The limits in force: ``"limits"`` of time and memory, ``"calls"`` filtered, ``"reading"`` of code alone.
    """
    held = set()
    if hasattr(os, "nice"):
        os.nice(_BEHIND)
    try:
        import resource
    except ImportError:  # not on Windows; the time limit of the parent holds there too
        return frozenset()
    processor = int(seconds * files) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has nothing to write
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held.add("limits")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
            if _read_only_code(libc):
                held.add("reading")
            if _filter_calls(libc):
                held.add("calls")
    return frozenset(held)


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Have the kernel refuse system calls; whether it does."""
    if platform.machine() not in _MACHINES:
        return False
    place, machine, set_filter = _MACHINES[platform.machine()]
    program = list(_instructions(place, machine))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    given = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    # 1: a filter; 1: for all threads.
    return int(libc.syscall(set_filter, 1, 1, ctypes.create_string_buffer(given))) == 0


def _instructions(place: int, machine: int) -> Iterator[tuple[int, int, int, int]]:
    """A filter, as operation, jump if so, jump if not, and value."""
    refuse = (_RETURN, 0, 0, _REFUSE)
    yield _LOAD, 0, 0, 4  # the machine whose calls are meant
    yield _EQUALS, 1, 0, machine
    yield refuse
    yield _LOAD, 0, 0, 0  # the number of the call
    yield _AT_LEAST, 0, 1, 0x40000000  # those of another table on x86-64
    yield refuse
    for numbers in _REFUSED.values():
        if (number := numbers[place]) is not None:
            yield _EQUALS, 0, 1, number
            yield refuse
    for numbers, argument in _OPENING.values():
        if (number := numbers[place]) is not None:
            yield _EQUALS, 0, 4, number
            yield _LOAD, 0, 0, 16 + 8 * argument
            yield _HAS, 0, 1, _WRITES
            yield refuse
            yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ALLOW


def _read_only_code(libc: ctypes.CDLL) -> bool:
    """Have the kernel let nothing be read but code, by Landlock; whether it does."""
    create, add, restrict = 444, 445, 446
    version = int(libc.syscall(create, None, ctypes.c_size_t(0), 1))
    if version < 1:
        return False
    handled = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    rules = int(libc.syscall(create, ctypes.create_string_buffer(struct.pack("Q", handled), 8), ctypes.c_size_t(8), 0))
    if rules < 0:
        return False
    try:
        for path in _code():
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:  # not on this system
                continue
            allowed = _READ_FILE | (_READ_FOLDER if path.is_dir() else 0)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened))
            libc.syscall(add, rules, 1, rule, 0)
            os.close(opened)
        return int(libc.syscall(restrict, rules, 0)) == 0
    finally:
        os.close(rules)


def _code() -> Iterable[Path]:
    """Where code is, and what it reads on its way: this package, installed ones, Python's own, the system's."""
    own = str(Path(__file__).parents[3])
    installed = [*site.getsitepackages(), *(one for one in sys.path if Path(one).name == "site-packages")]
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/urandom"]
    return [Path(one) for one in (own, *installed, *python, *system)]
