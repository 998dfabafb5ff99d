"""`make vm`: the suite of limits on this machine, and in a QEMU guest that has cgroup v2 alone.

`prepare` makes kernel and root. Here a disk is made of them, of this repository and of what its environment has
installed; the guest boots from it, runs the same tests (`guest`), and tells the results by its serial line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = "tests/limits"

_HOST_TIMEOUT_S = 240
_GUEST_TIMEOUT_S = 420
_DISK = "2G"
# In this order: each needs those before it.
_MODULES = (
    "virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk",
)  # fmt: skip
# Of the environment, what no test in the guest needs; most of its size.
_LEFT_OUT = (
    "mypy*",
    "ruff*",
    "buf*",
    "grpc_tools",
    "grpcio_tools*",
    "pip*",
    "hypothesis*",
    "cryptography*",
)
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs devtmpfs /dev
for each in {modules}; do /bin/busybox insmod /$each.ko 2>/dev/null; done
for try in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda ] && break; /bin/busybox sleep 0.2; done
/bin/busybox mount -t ext4 /dev/vda /root || /bin/busybox poweroff -f
exec /bin/busybox switch_root /root /repo/tests/vm/guest
"""
_SUMMARY = re.compile(r"^=*\s*(?:(\d+) failed, )?(\d+) passed\b.*$", re.MULTILINE)
_STATUS = re.compile(r"^guest: exit status (\d+)\s*$", re.MULTILINE)


def main() -> int:
    host, v1 = _here()
    guest, v2 = _in_guest(sys.argv[1:] or [TESTS])
    print(f"cases on v1: {v1}, cases on v2: {v2}")
    return host or guest


def _here() -> tuple[int, int]:
    """The suite on this machine: exit status, and cases that passed."""
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-q",
    ]
    done = subprocess.run(
        [*command, TESTS], cwd=ROOT, timeout=_HOST_TIMEOUT_S, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    return done.returncode, _passed(done.stdout)


def _in_guest(tests: list[str]) -> tuple[int, int]:
    prepared = subprocess.run([ROOT / "tests/vm/prepare"], stdout=subprocess.PIPE, text=True, check=True)
    cache = Path(prepared.stdout.strip())
    with tempfile.TemporaryDirectory(prefix="run.", dir=cache) as work:
        disk = _disk(cache, Path(work), tests)
        return _boot(cache, Path(work), disk)


def _disk(cache: Path, work: Path, tests: list[str]) -> Path:
    root = work / "root"
    root.mkdir()
    subprocess.run(["tar", "-C", root, "-xf", cache / "root.tar"], check=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in ("services", "clients", "protos", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / "repo" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / "repo" / name)
    packages = root / "usr/local/lib/python3.11/dist-packages"
    installed = next((Path(sys.prefix) / "lib").glob("python3.11/site-packages"))
    shutil.copytree(installed, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_LEFT_OUT, "*.pth"))
    (packages / "repo.pth").write_text("/repo/services\n/repo/clients\n")
    # Else every process in the guest would compile what it imports; much the slowest of all.
    subprocess.run([sys.executable, "-m", "compileall", "-q", root / "repo"], check=True)
    script = root / "usr/bin/tightship"  # beside its Python, as in an environment
    script.write_text("#!/usr/bin/python3\nfrom tightship.cli.main import main\nmain()\n")
    script.chmod(0o755)
    guest = root / "repo/tests/vm/guest"
    guest.write_text(guest.read_text().replace("$TESTS", " ".join(tests)))
    disk = work / "disk"
    with disk.open("wb") as file:
        file.truncate(2 << 30)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, disk], check=True)
    shutil.rmtree(root)
    return disk


def _initramfs(cache: Path, work: Path) -> Path:
    tree = work / "initramfs"
    for name in ("bin", "dev", "root"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    for module in _MODULES:
        shutil.copy(cache / "modules" / f"{module}.ko", tree)
    init = tree / "init"
    init.write_text(_INIT.format(modules=" ".join(_MODULES)))
    init.chmod(0o755)
    names = "\n".join(str(each.relative_to(tree)) for each in sorted(tree.rglob("*")))
    packed = work / "initramfs.cpio"
    with packed.open("wb") as file:
        subprocess.run(
            ["/bin/busybox", "cpio", "-o", "-H", "newc"], cwd=tree, input=names.encode(), stdout=file, check=True
        )
    return packed


def _boot(cache: Path, work: Path, disk: Path) -> tuple[int, int]:
    """Exit status of the tests in the guest, 1 where it did not tell any; cases that passed."""
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048", "-nodefaults",
        "-nographic", "-no-reboot", "-serial", "stdio", "-kernel", str(cache / "vmlinuz"),
        "-initrd", str(_initramfs(cache, work)), "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
        "-drive", f"file={disk},format=raw,if=virtio,cache=unsafe",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as qemu:
        try:
            said, _ = qemu.communicate(timeout=_GUEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            qemu.kill()
            said, _ = qemu.communicate()
            said += f"\nthe guest was not done after {_GUEST_TIMEOUT_S} s\n"
    said = said.replace("\r", "")
    print(said)
    told = _STATUS.search(said)
    return int(told[1]) if told else 1, _passed(said)


def _passed(output: str) -> int:
    found = _SUMMARY.findall(output)
    return int(found[-1][1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
