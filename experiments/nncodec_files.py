"""Networks coded by NNCodec (ISO/IEC 15938-17): those of few_images.py, or the levels of a file as they are.

    pip install nncodec safetensors         in an environment of its own: nncodec needs numpy below 2
    python experiments/nncodec_files.py --weights DIR
    python experiments/nncodec_files.py --levels FILE.npz --out DECODED.npz     for benchmarks/codec.py

With ``--weights`` it quantises, which needs no images. For each network and quantisation parameter it writes
the decoded weights and the size of the bitstream to ``NETWORK_nncodec-QP.npz`` in the folder of the weights.
``few_images.py --rows nncodec-24,…`` scores them. Dependent quantisation is on; everything else is NNCodec's
default. BatchNorm is coded as it is: folding it first made the first network's file 0.5 % larger, and the
second's 3 % smaller. With ``--levels`` it codes int32 arrays without loss, and also writes the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

NETWORKS = ("mobilenet_v2", "tf_efficientnet_lite0")
PARAMETERS = (24, 26, 28, 30)
"""Negated. The larger, the finer: the step halves every four."""


def main() -> None:
    """Code every network with every parameter, or the levels of one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--weights", type=Path, help="folder of weights, and of the results")
    what.add_argument("--levels", type=Path, help="int32 arrays to code without loss")
    parser.add_argument("--out", type=Path, help="where the decoded levels are written")
    parser.add_argument("--repeats", type=int, default=1, help="times are medians of so many")
    options = parser.parse_args()
    if options.levels:
        np.savez(options.out, **coded_levels(dict(np.load(options.levels)), options.repeats))
    else:
        code_networks(options.weights)


def coded_levels(levels: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The decoded levels, the size of the bitstream, and the seconds of encoding and decoding."""
    from nncodec.nn import decode, encode  # type: ignore[import-not-found]  # see above

    encode_s, decode_s = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        stream = encode(levels, args={"verbose": False})
        middle = time.perf_counter()
        decoded = decode(stream)
        encode_s.append(middle - start)
        decode_s.append(time.perf_counter() - middle)
    times = {"encode_s": statistics.median(encode_s), "decode_s": statistics.median(decode_s)}
    return {"file_bytes": len(stream), "version": version("nncodec"), **times, **decoded}


def code_networks(folder: Path) -> None:
    """Code every network of a folder with every parameter."""
    from nncodec.nn import decode, encode  # see above
    from safetensors.numpy import load_file

    for network in NETWORKS:
        state = load_file(folder / f"{network}.safetensors")
        state = {name: value for name, value in state.items() if value.dtype == np.float32}
        for parameter in PARAMETERS:
            stream = encode(state, args={"qp": -parameter, "use_dq": True})
            arrays: dict[str, Any] = {"file_bytes": len(stream), **decode(stream)}
            path = folder / f"{network}_nncodec-{parameter}.npz"
            np.savez_compressed(path, **arrays)
            print(path, len(stream))


if __name__ == "__main__":
    main()
