"""The system calls a program may not make, as a filter that the kernel runs before each call. It needs no privilege.

No sockets but a connected local pair, no reading or stopping of other processes, no namespaces or mounts, no memory that
limits don't see (memfd, System V, message queues), no kernel interfaces with a history (bpf, io_uring, keyrings ...).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from polyturn.sandbox import kernel

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENT_0 = 0, 4, 16
_AF_UNIX = 1
_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG = 1
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW flag that clone takes
_X32 = 0x40000000

_REFUSED = """
    socket connect bind listen accept accept4
    ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp process_madvise process_mrelease perf_event_open
    mount umount2 pivot_root chroot setns unshare fsopen fsconfig fsmount fspick move_mount open_tree mount_setattr
    memfd_create memfd_secret shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semop semctl semtimedop mq_open mq_unlink
    bpf userfaultfd io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl vmsplice
    mbind set_mempolicy move_pages migrate_pages
    swapon swapoff reboot kexec_load kexec_file_load init_module finit_module delete_module iopl ioperm acct quotactl
    quotactl_fd syslog settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname lookup_dcookie
    name_to_handle_at open_by_handle_at fanotify_init personality modify_ldt vhangup
""".split()
_TO_OTHERS = """
    tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open inotify_add_watch
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat file_setattr
""".split()
"""What reaches processes and files of the same user, past Landlock; refused where a program has no namespaces."""
_PRIORITIES = "setpriority sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set".split()
"""Refused where a program is the same user as others: its init, at least."""

_X86_64 = """
    socket 41 socketpair 53 connect 42 bind 49 listen 50 accept 43 accept4 288 ptrace 101 process_vm_readv 310
    process_vm_writev 311 pidfd_getfd 438 kcmp 312 perf_event_open 298 bpf 321 userfaultfd 323 io_uring_setup 425
    io_uring_enter 426 io_uring_register 427 add_key 248 request_key 249 keyctl 250 mount 165 umount2 166 pivot_root 155
    chroot 161 setns 308 unshare 272 fsopen 430 fsconfig 431 fsmount 432 fspick 433 move_mount 429 open_tree 428
    mount_setattr 442 swapon 167 swapoff 168 reboot 169 kexec_load 246 kexec_file_load 320 init_module 175
    finit_module 313 delete_module 176 iopl 172 ioperm 173 acct 163 quotactl 179 quotactl_fd 443 syslog 103
    settimeofday 164 clock_settime 227 clock_adjtime 305 adjtimex 159 sethostname 170 setdomainname 171
    lookup_dcookie 212 name_to_handle_at 303 open_by_handle_at 304 memfd_create 319 memfd_secret 447 shmget 29 shmat 30
    shmctl 31 msgget 68 msgsnd 69 msgrcv 70 msgctl 71 semget 64 semop 65 semctl 66 semtimedop 220 mq_open 240
    mq_unlink 241 fanotify_init 300 personality 135 modify_ldt 154 vhangup 153 prlimit64 302 vmsplice 278 mbind 237
    set_mempolicy 238 move_pages 279 migrate_pages 256 process_madvise 440 process_mrelease 448 clone 56 clone3 435
    fork 57 vfork 58 prctl 157 kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_send_signal 424
    pidfd_open 434
    setpriority 141 sched_setaffinity 203 sched_setscheduler 144 sched_setparam 142 sched_setattr 314 ioprio_set 251
    inotify_add_watch 254 chmod 90 fchmod 91 fchmodat 268 fchmodat2 452 chown 92 fchown 93 lchown 94 fchownat 260
    utime 132 utimes 235 futimesat 261 utimensat 280 setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197
    lremovexattr 198 fremovexattr 199 setxattrat 463 removexattrat 466 file_setattr 469
"""
_GENERIC = """
    socket 198 socketpair 199 connect 203 bind 200 listen 201 accept 202 accept4 242 ptrace 117 process_vm_readv 270
    process_vm_writev 271 pidfd_getfd 438 kcmp 272 perf_event_open 241 bpf 280 userfaultfd 282 io_uring_setup 425
    io_uring_enter 426 io_uring_register 427 add_key 217 request_key 218 keyctl 219 mount 40 umount2 39 pivot_root 41
    chroot 51 setns 268 unshare 97 fsopen 430 fsconfig 431 fsmount 432 fspick 433 move_mount 429 open_tree 428
    mount_setattr 442 swapon 224 swapoff 225 reboot 142 kexec_load 104 kexec_file_load 294 init_module 105
    finit_module 273 delete_module 106 acct 89 quotactl 60 quotactl_fd 443 syslog 116 settimeofday 170
    clock_settime 112 clock_adjtime 266 adjtimex 171 sethostname 161 setdomainname 162 lookup_dcookie 18
    name_to_handle_at 264 open_by_handle_at 265 memfd_create 279 memfd_secret 447 shmget 194 shmat 196 shmctl 195
    msgget 186 msgsnd 189 msgrcv 188 msgctl 187 semget 190 semop 193 semctl 191 semtimedop 192 mq_open 180
    mq_unlink 181 fanotify_init 262 personality 92 vhangup 58 prlimit64 261 vmsplice 75 mbind 235 set_mempolicy 237
    move_pages 239 migrate_pages 238 process_madvise 440 process_mrelease 448 clone 220 clone3 435 prctl 167 kill 129 tkill 130
    tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 pidfd_send_signal 424 pidfd_open 434
    setpriority 140 sched_setaffinity 122 sched_setscheduler 119 sched_setparam 118 sched_setattr 274 ioprio_set 30
    inotify_add_watch 27 fchmod 52 fchmodat 53 fchmodat2 452 fchown 55 fchownat 54 utimensat 88 setxattr 5 lsetxattr 6
    fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 setxattrat 463 removexattrat 466 file_setattr 469
"""
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _GENERIC), "riscv64": (0xC00000F3, _GENERIC)}


def available() -> bool:
    """Whether a filter can be made for this machine."""
    return os.uname().sysname == "Linux" and os.uname().machine in _MACHINES


def build(*, new_processes: bool, same_user: bool = False, signals_to: int | None = None) -> bytes:
    """The filter, for `install`.

    Without `new_processes` threads are all that can be started. As the `same_user` as others, a program can't change
    priorities. With `signals_to`, for a program without namespaces, signals reach only that process, it can't call off the
    signal that ends it with its parent, nor change permissions, owners and times of files, which Landlock lets pass.

    Raises OSError (ENOSYS) on a machine whose system calls are not known here.
    """
    machine = os.uname().machine
    if not available():
        raise OSError(errno.ENOSYS, f"seccomp: the system calls of {machine} are not known here")
    audit, table = _MACHINES[machine]
    words = table.split()
    numbers = {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        code += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)]
    refused = [*_REFUSED, *(_PRIORITIES if same_user else []), *(_TO_OTHERS if signals_to is not None else [])]
    for name in refused:
        code += _refuse(numbers.get(name), errno.EPERM)
    code += _refuse(numbers["clone3"], errno.ENOSYS)  # its flags are out of the filter's sight; libraries fall back to clone
    code += _if_argument(numbers["socketpair"], _EQUAL, _AF_UNIX)
    code += _if_argument(numbers["prlimit64"], _EQUAL, 0)
    if signals_to is not None:
        code += _if_argument(numbers["kill"], _EQUAL, signals_to) + _if_argument(numbers["tgkill"], _EQUAL, signals_to)
        code += _unless_argument(numbers["prctl"], _EQUAL, _PR_SET_PDEATHSIG)
    if new_processes:
        code += _unless_argument(numbers["clone"], _ANY_BIT, _NEW_NAMESPACES)
    else:
        code += _if_argument(numbers["clone"], _ANY_BIT, _CLONE_THREAD, errno.EAGAIN)
        code += _refuse(numbers.get("fork"), errno.EAGAIN) + _refuse(numbers.get("vfork"), errno.EAGAIN)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def install(code: bytes) -> None:
    """Bind this process, and all it starts, to a filter for good. Needs no_new_privs."""
    steps = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(steps)))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _refuse(number: int | None, code: int) -> list[bytes]:
    """Steps that refuse a call; none for a call this machine doesn't have."""
    return [] if number is None else [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | code)]


def _if_argument(number: int, test: int, value: int, code: int = errno.EPERM) -> list[bytes]:
    """Steps that allow a call when its first argument passes the test, and refuse it otherwise."""
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _ARGUMENT_0),
        _step(test, value, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | code),
    ]


def _unless_argument(number: int, test: int, value: int) -> list[bytes]:
    """Steps that refuse a call when its first argument passes the test, and allow it otherwise."""
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _ARGUMENT_0),
        _step(test, value, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
