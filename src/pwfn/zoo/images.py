"""A folder of images without labels: most of them to compress with, the others to measure on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from pwfn.errors import DataError
from pwfn.zoo.dataset import Data, DataOptions, fingerprint
from pwfn.zoo.folder import (
    EXTENSIONS,
    IMAGENET_SIZE,
    ImageLoader,
    Images,
    existing,
    files_below,
    image_bytes,
    read_all,
)

_MEASURED_SHARE, _MOST_MEASURED = 5, 1000  # a fifth of the images, at most a thousand
_KEPT_BYTES = 2**31  # of pixels in memory; a larger folder is read again in every epoch
_ENOUGH = 16  # readable images, with which a folder is used although some cannot be read
_FEW = 10  # at most a tenth of the images may be unreadable


def open_images(spec: str, directory: str, options: DataOptions) -> Data:
    """All images in a folder and below it, prepared as for testing; subfolders are not classes.

    A fifth of them, at most 1,000 (or ``options.holdout``), is measured on and not trained on. Which ones
    depends only on the sorted names. Batches are images alone. The images are read once, into memory, if
    they take at most 2 GiB there; a few that cannot be read are then left out, with a warning.
    """
    root = existing(directory)
    options.check_channels(f"{root}: images are read in 3 channels", 3)
    images = Images(root, np.array(files_below(root, root)), None)
    count = len(images.names)
    if count == 0:
        raise DataError(f"{root}: holds no images: allowed are files that end in {', '.join(EXTENSIONS)}")
    if count == 1:
        raise DataError(
            f"{root}: holds one image: at least two are needed, one to compress with and one to measure on"
        )
    size = options.image_size or IMAGENET_SIZE
    measured = options.holdout or min(max(count // _MEASURED_SHARE, 1), _MOST_MEASURED)
    kept, held = replace(options, holdout=measured).divide(spec, count)
    assert held is not None  # some are held out
    parts = [images.chosen(kept[:0] if options.testing else kept), images.chosen(held)]
    loaders = _loaders(parts, options)
    train, test = (loader.images for loader in loaders)
    if not options.testing:
        options.check_divisible(spec, len(train.names), len(test.names))
    return Data(
        name=spec,
        train=loaders[0],
        test=loaders[1],
        classes=None,
        image_shape=(3, size, size),
        fingerprint=fingerprint("images", (*train.facts(), *test.facts())),
        train_size=len(train.names),
        test_size=len(test.names),
        labelled=False,
    )


def _loaders(parts: list[Images], options: DataOptions) -> list[ImageLoader]:
    """Loaders for training and testing, without images that cannot be read."""
    plain = replace(options, augment=False)
    count = sum(len(part.names) for part in parts)
    if image_bytes(count, options) > _KEPT_BYTES:
        return [ImageLoader(part, plain, train=not n) for n, part in enumerate(parts)]
    loaders, failures = [], []
    for number, part in enumerate(parts):
        pixels, errors = read_all(part, plain)
        failures += list(errors.values())
        good = np.setdiff1d(np.arange(len(part.names)), list(errors))
        if errors:
            part, pixels = part.chosen(good), pixels[good]
        loaders.append(ImageLoader(part, plain, train=not number, pixels=pixels))
    if failures:
        lost = f"{len(failures):,} of {count:,} images cannot be read, the first: {failures[0]}"
        emptied = any(
            len(part.names) and not len(loader) for part, loader in zip(parts, loaders, strict=True)
        )
        if count - len(failures) < _ENOUGH or _FEW * len(failures) > count or emptied:
            raise DataError(f"{parts[0].folder}: {lost}: remove or replace them")
        warnings.warn(f"{parts[0].folder}: left out, {lost}", stacklevel=2)
    return loaders
