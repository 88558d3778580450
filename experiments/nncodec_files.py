"""The networks of few_images.py coded by NNCodec (ISO/IEC 15938-17), which needs no images.

    pip install nncodec safetensors         in an environment of its own: nncodec needs numpy below 2
    python experiments/nncodec_files.py --weights DIR

For each network and quantisation parameter it writes the decoded weights and the size of the bitstream to
``NETWORK_nncodec-QP.npz`` in the folder of the weights. ``few_images.py --rows nncodec-24,…`` scores them.
Dependent quantisation is on; everything else is NNCodec's default. BatchNorm is coded as it is: folding it
first made the first network's file 0.5 % larger, and the second's 3 % smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

NETWORKS = ("mobilenet_v2", "tf_efficientnet_lite0")
PARAMETERS = (24, 26, 28)
"""Negated. The larger, the finer: the step halves every four."""


def main() -> None:
    """Code every network with every parameter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder of weights, and of the results")
    options = parser.parse_args()
    from nncodec.nn import decode, encode  # type: ignore[import-not-found]  # see above
    from safetensors.numpy import load_file

    for network in NETWORKS:
        state = load_file(options.weights / f"{network}.safetensors")
        state = {name: value for name, value in state.items() if value.dtype == np.float32}
        for parameter in PARAMETERS:
            stream = encode(state, args={"qp": -parameter, "use_dq": True})
            arrays: dict[str, Any] = {"file_bytes": len(stream), **decode(stream)}
            path = options.weights / f"{network}_nncodec-{parameter}.npz"
            np.savez_compressed(path, **arrays)
            print(path, len(stream))


if __name__ == "__main__":
    main()
