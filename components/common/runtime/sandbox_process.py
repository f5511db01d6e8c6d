"""Process that runs one program and its tests in isolation. `code_sandbox` starts it as a script, with a clean environment.

The program has its own Linux namespaces, and a file system with nothing but Python's library and a small folder in
memory. It has no privileges. A filter of system calls (seccomp) denies it sockets, other processes and threads, so that
the limits of one process are those of the program.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import resource
import signal
import struct
import sys
import types
from pathlib import Path

READY = b"ready "  # written before the program starts
WORK_FOLDER, WORK_BYTES, WORK_FILES = "/work", 16 << 20, 1024
MAX_OPEN_FILES = 64
LIBRARY_FOLDERS = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
PACKAGE_FOLDERS = ("*-packages", "python3*/*-packages")  # site-packages, dist-packages
TIME_ZONES = Path("/usr/share/zoneinfo")
NEW_ROOT = "/proc"  # a folder that exists everywhere, and that the program does not need

# unshare(2): mount, cgroup, UTS, IPC, user, PID and network namespaces
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 2, -100, 0x8000, 442
MOUNT_ATTR_NODEV = 4
ATTRIBUTES = struct.pack("QQQQ", 1 | 2 | MOUNT_ATTR_NODEV, 0, 0, 0)  # mount_setattr(2): read-only, nosuid, nodev
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522
X32_CALLS = 0x40000000  # a second numbering of the system calls of x86-64
# Numbers of the denied system calls on x86-64 and arm64; -1: it does not exist
DENIED_CALLS = {
    # other processes and programs
    "clone": (56, 220),
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "clone3": (435, 435),
    "prctl": (157, 167),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # sockets
    "socket": (41, 198),
    "socketpair": (53, 199),
    # memory beyond the limit
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    # rarely needed parts of the kernel
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
# By machine: seccomp's number of the architecture, the number of pivot_root(2), and the column of `DENIED_CALLS`
ARCHITECTURES = {"x86_64": (0xC000003E, 155, 0), "aarch64": (0xC00000B7, 41, 1)}
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the request from standard input, run it in a child in new namespaces, and exit with the child's status."""
    result = os.dup(1)
    try:
        request = json.loads(sys.stdin.buffer.read())
        die_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
            raise OSError(
                f"expected Linux on {' or '.join(ARCHITECTURES)}; found {platform.system()} on {platform.machine()}"
            )
        enter_namespaces()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(int(status != 0))
        os.setsid()  # a signal to the process group reaches no other process
        die_with_parent()
        hide_files()
        set_limits(request["cpu_seconds"], request["memory_bytes"])
        drop_privileges()
    except BaseException as error:
        os.write(result, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.write(result, READY)
    program, test, entry_point, token = (request.pop(name) for name in ("program", "test", "entry_point", "token"))
    del request
    try:
        run(program, test, entry_point)
    except BaseException:  # the program's own errors
        os._exit(1)
    os.write(result, token.encode())
    os._exit(0)


def check(status: int, action: str) -> None:
    """Raise OSError if a C function returned an error."""
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Configure the kernel to kill this process when its parent ends."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def enter_namespaces() -> None:
    """Enter new namespaces. The user's id is 0 in the new user namespace, which allows mounts."""
    user, group = os.geteuid(), os.getegid()
    check(LIBC.unshare(NEW_NAMESPACES), "unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    texts = (text.encode() or None for text in (source, target, kind))
    check(LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def hide_files() -> None:
    """Replace the file system by Python's library, read-only, and a writable folder in memory."""
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    library = Path(sys.base_prefix, "lib").resolve()
    folders = dict.fromkeys((*LIBRARY_FOLDERS, library, Path(os.__file__).resolve().parent, TIME_ZONES))
    for folder in folders:
        copy = Path(NEW_ROOT) / folder.relative_to("/")
        if folder.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(folder.readlink())
        elif folder.is_dir() and not copy.is_dir():
            copy.mkdir(parents=True)
            mount(str(folder), str(copy), "", MS_BIND | MS_REC)
    for folder in folders:
        for pattern in PACKAGE_FOLDERS if not folder.is_symlink() else ():
            for hidden in Path(NEW_ROOT + str(folder)).glob(pattern):
                mount("tmpfs", str(hidden), "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    null = Path(NEW_ROOT + os.devnull)
    if Path(os.devnull).exists():
        null.parent.mkdir()
        null.touch()
        mount(os.devnull, str(null), "", MS_BIND)
    Path(NEW_ROOT + WORK_FOLDER).mkdir()
    os.chdir(NEW_ROOT)
    _, pivot_root, _ = ARCHITECTURES[platform.machine()]
    check(LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount2")
    status = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ATTRIBUTES, len(ATTRIBUTES))
    check(status, "mount_setattr")
    if Path(os.devnull).exists():
        attributes = struct.pack("QQQQ", 0, MOUNT_ATTR_NODEV, 0, 0)  # a device
        status = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.devnull.encode(), 0, attributes, len(attributes))
        check(status, f"mount_setattr {os.devnull}")
    mount("tmpfs", WORK_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=700")
    os.chdir(WORK_FOLDER)


def set_limits(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit the process, which cannot start others."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: WORK_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def drop_privileges() -> None:
    """Drop all capabilities, also in new programs, and filter the system calls."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers that the kernel does not know
    check(LIBC.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    program = build_filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    check(LIBC.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def build_filter() -> bytes:
    """Return the seccomp filter in classic BPF: EPERM for the denied system calls (seccomp(2))."""
    load, equal, at_least, return_value = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    architecture, _, column = ARCHITECTURES[platform.machine()]
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (return_value, 0, 0, kill), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, X32_CALLS), (return_value, 0, 0, kill)]
    for numbers in DENIED_CALLS.values():
        if (number := numbers[column]) >= 0:
            rules += [(equal, 0, 1, number), (return_value, 0, 0, deny)]
    rules.append((return_value, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def run(program: str, test: str, entry_point: str) -> None:
    """Run the program, then the test, and call its `check` with the tested function if the row names one."""
    random.seed(0)
    module = sys.modules["answer"] = types.ModuleType("answer")  # for dataclasses and pickle
    names = vars(module)
    sources = {"answer.py": program, "test.py": test}
    for code in [compile(text, name, "exec", dont_inherit=True) for name, text in sources.items()]:
        exec(code, names)  # noqa: S102 - the purpose of this process
    if entry_point:
        names["check"](names[entry_point])


if __name__ == "__main__":
    main()
