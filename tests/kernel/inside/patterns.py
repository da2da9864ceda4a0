"""What fio does, for each of the figures."""

PATTERNS = {
    "seq1m": ["--bs=1M", "--iodepth=8"],
    "seq128k": ["--bs=128k", "--iodepth=32"],
    "rand4k-qd1": ["--bs=4k", "--iodepth=1"],
    "rand4k-qd64": ["--bs=4k", "--iodepth=64"],
}
