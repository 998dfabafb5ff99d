"""The default filter's system calls by name, of every architecture; those that only some capabilities open are apart.

What is let through is what ordinary programs use and what concerns the process alone. io_uring is not: its operations
pass by every filter.
"""

from __future__ import annotations

from tightship.kernel.capabilities import NUMBERS

_ALLOWED = """
    accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_adjtime
    clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl
    fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex
    futex_requeue futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
    getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid
    getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
    io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr listxattrat
    llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier memfd_create memfd_secret
    mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap
    name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2
    pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease
    process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat
    readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat rename renameat renameat2
    restart_syscall riscv_flush_icache riscv_hwprobe rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
    semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid
    setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt
    setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice
    stat statfs statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
    timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times
    tkill truncate umask uname unlink unlinkat uretprobe utime utimensat utimes vfork vmsplice wait4 waitid write
    writev
"""
ALLOWED = tuple(_ALLOWED.split())

REFUSED = ("add_key", "keyctl", "request_key", "userfaultfd")
"""Nobody's, whatever the capabilities; with all that a capability would open these are EPERM."""

_BY_NAME = {
    "SYS_ADMIN": "fanotify_init fanotify_mark fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr"
    " move_mount open_tree pivot_root quotactl quotactl_fd setdomainname sethostname setns"
    " swapoff swapon umount2 unshare",
    "BPF": "bpf",
    "DAC_READ_SEARCH": "open_by_handle_at",
    "PERFMON": "perf_event_open",
    "SYSLOG": "syslog",
    "SYS_BOOT": "kexec_file_load kexec_load reboot",
    "SYS_CHROOT": "chroot",
    "SYS_MODULE": "delete_module finit_module init_module",
    "SYS_NICE": "get_mempolicy mbind migrate_pages move_pages set_mempolicy set_mempolicy_home_node",
    "SYS_PACCT": "acct",
    "SYS_PTRACE": "kcmp pidfd_getfd process_madvise",
    "SYS_RAWIO": "ioperm iopl",
    "SYS_TIME": "clock_settime settimeofday",
    "SYS_TTY_CONFIG": "vhangup",
}

BY_CAPABILITY = {NUMBERS[f"CAP_{name}"]: tuple(calls.split()) for name, calls in _BY_NAME.items()}
"""By a capability's number, the calls that are let through with it."""
