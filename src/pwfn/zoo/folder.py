"""Image folders: ImageNet's ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, or images without labels."""

from __future__ import annotations

import functools
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from pwfn.config.seeds import seed_from
from pwfn.errors import DataError, cause
from pwfn.zoo.arrays import Normaliser
from pwfn.zoo.dataset import Data, DataOptions, fingerprint
from pwfn.zoo.epochs import Epochs, epoch_order, shares
from pwfn.zoo.models import ready_torchvision

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SAMPLED_FILES = 16  # of each split, whose bytes go into the fingerprint
_LAYOUT = "the layout is train/<class>/*.JPEG and val/<class>/*.JPEG"
IMAGENET_SIZE = 224
_READ_TOGETHER = 16  # images per message of a worker: small, since containers share little memory
_MEASURED_SHARE, _MOST_MEASURED = 5, 1000  # a fifth of the images, at most a thousand
_KEPT_BYTES = 2**31  # of pixels in memory; a larger folder is read again in every epoch
_ENOUGH = 16  # readable images, with which a folder is used although some cannot be read
_FEW = 10  # at most a tenth of the images may be unreadable


@dataclass(frozen=True)
class Images:
    """Image files in a folder, and the class number of each; None for images without labels."""

    folder: Path
    names: np.ndarray  # bytes, relative to the folder: a million strings would be copied into each worker
    labels: np.ndarray | None

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(bytes(self.names[index]))

    def chosen(self, indices: np.ndarray) -> Images:
        """Some of the images."""
        labels = None if self.labels is None else self.labels[indices]
        return Images(self.folder, self.names[indices], labels)

    def facts(self) -> Iterator[Any]:
        """What identifies the images: names, labels, and the content of a few files."""
        yield from (b"\n".join(self.names.tolist()), self.labels)
        sampled = np.linspace(0, len(self.names) - 1, _SAMPLED_FILES if len(self.names) else 0)
        for index in np.unique(sampled.astype(int)):
            try:
                yield self.path(int(index)).read_bytes()
            except OSError as error:
                raise DataError(f"{self.path(int(index))}: cannot be read: {cause(error)}") from error


def open_folder(spec: str, directory: str, options: DataOptions) -> Data:
    """The data set in a folder; classes are numbered from 0 in the order of their names.

    Where only testing is wanted, ``val`` alone is enough, and so are the class folders themselves: then
    every class of the network must be there, since their numbers come from their order.
    """
    root = _existing(directory)
    options.check_channels(f"{root}: images are read in 3 channels", 3)
    size = options.image_size or IMAGENET_SIZE
    if options.testing and not (root / "train").is_dir():
        folder = root / "val" if (root / "val").is_dir() else root
        class_names = _class_names(folder)
        test = _scan(folder, class_names, class_names)
        train = test.chosen(np.arange(0))
    else:
        class_names = _class_names(root / "train")
        train = _scan(root / "train", class_names, class_names)
        kept, held = options.divide(spec, len(train.names))
        if held is None:
            present = _class_names(root / "val")
            if unknown := sorted(set(present) - set(class_names)):
                raise DataError(f"{root / 'val' / unknown[0]}: this class has no folder in {root / 'train'}")
            test = _scan(root / "val", present, class_names)
        else:
            test = train.chosen(held)
        train = train.chosen(kept)
        options.check_divisible(spec, len(train.names), len(test.names))
    return Data(
        name=spec,
        train=ImageLoader(train, options, train=True),
        test=ImageLoader(test, options, train=False),
        classes=len(class_names),
        image_shape=(3, size, size),
        fingerprint=fingerprint("imagefolder", (class_names, *train.facts(), *test.facts())),
        train_size=len(train.names),
        test_size=len(test.names),
        class_names=class_names,
    )


def open_images(spec: str, directory: str, options: DataOptions) -> Data:
    """All images in a folder and below it, prepared as for testing; subfolders are not classes.

    A fifth of them, at most 1,000 (or ``options.holdout``), is measured on and not trained on. Which ones
    depends only on the sorted names. Batches are images alone. The images are read once, into memory, if
    they take at most 2 GiB there; a few that cannot be read are then left out, with a warning.
    """
    root = _existing(directory)
    options.check_channels(f"{root}: images are read in 3 channels", 3)
    images = Images(root, np.array(_files_below(root, root)), None)
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
    if 3 * count * (options.image_size or IMAGENET_SIZE) ** 2 > _KEPT_BYTES:
        return [ImageLoader(part, plain, train=not n) for n, part in enumerate(parts)]
    loaders, failures = [], []
    for number, part in enumerate(parts):
        pixels, errors = _read_all(part, plain)
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


def _existing(directory: str) -> Path:
    """A folder that exists."""
    root = Path(directory).expanduser()
    if root.is_file():
        raise DataError(f"{root}: is a file, not a folder: name the folder that holds the images")
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    return root


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder.parent}: has no folder {folder.name!r}: {_LAYOUT}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder}: has no class folders: {_LAYOUT}")
    return tuple(names)


def _scan(folder: Path, present: tuple[str, ...], class_names: tuple[str, ...]) -> Images:
    names: list[bytes] = []
    labels: list[int] = []
    for class_name in present:
        found = _files_below(folder / class_name, folder)
        if not found:
            raise DataError(f"{folder / class_name}: this class folder has no images")
        names += found
        labels += [class_names.index(class_name)] * len(found)
    return Images(folder, np.array(names), np.array(labels, dtype=np.int64))


def _files_below(folder: Path, root: Path) -> list[bytes]:
    """The image files of a folder and those below it, relative to ``root``, in the order of their paths."""
    found = sorted(
        os.path.relpath(os.path.join(below, file), root)
        for below, _, files in os.walk(folder, followlinks=True)
        for file in files
        if os.path.splitext(file)[1].lower() in EXTENSIONS and file[0] != "."
    )
    return list(map(os.fsencode, found))


class ImageLoader(Epochs):
    """Batches of images that worker processes read and crop; they are normalised on the device.

    The random crop and flip of an image depend on (seed, epoch, its number) only, not on the number of
    workers or on which of them reads it.
    """

    def __init__(
        self, images: Images, options: DataOptions, *, train: bool, pixels: Tensor | None = None
    ) -> None:
        self.images, self.options, self.train = images, options, train
        self._pixels = pixels  # read before, uint8: then no file is opened again
        size = options.batch_size if train else options.test_batch_size or options.batch_size
        self._shares = shares(len(images.names), size, options.rank, options.world, exact=not train)
        self._normalise = Normaliser(options.mean, options.std, torch.device(options.device))

    def __len__(self) -> int:
        return len(self._shares)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch ``number``, beginning with batch ``start``; earlier ones are not read.

        A batch is (images, targets), or images alone where there are no labels.
        """
        options, device = self.options, torch.device(self.options.device)
        order = epoch_order(len(self.images.names), options.seed, number, shuffle=self.train)
        batches = [order[share] for share in self._shares[start:]]
        if self._pixels is not None:
            yield from (self._normalise(self._pixels[batch].to(device)) for batch in batches)
            return
        if not batches:
            return
        epoch = _Epoch(self.images, options, self.train, number)
        reader = _reader(epoch, [batch.numpy() for batch in batches])
        try:
            for parts, errors in reader:
                if error := next(filter(None, errors), None):
                    raise DataError(error)
                images, *targets = (part.to(device, non_blocking=True) for part in parts)
                yield (self._normalise(images), *targets) if targets else self._normalise(images)
        finally:
            del reader  # ends the workers now, even if an exception keeps this frame alive


def _read_all(images: Images, options: DataOptions) -> tuple[Tensor, dict[int, str]]:
    """The pixels of all images as the network is tested on them, uint8, and why some cannot be read."""
    size = options.image_size or IMAGENET_SIZE
    pixels = torch.empty(len(images.names), 3, size, size, dtype=torch.uint8)
    epoch = _Epoch(images, options, train=False, number=0)
    batches = [*torch.arange(len(images.names)).split(_READ_TOGETHER)] if len(images.names) else []
    reader = _reader(epoch, [batch.numpy() for batch in batches])
    errors: dict[int, str] = {}
    try:
        for batch, (parts, why) in zip(batches, reader, strict=True):
            errors |= {number: reason for number, reason in zip(batch.tolist(), why, strict=True) if reason}
            if parts:
                good = torch.tensor([not reason for reason in why])
                pixels[batch[good]] = parts[0]
    finally:
        del reader
    return pixels, errors


def _reader(epoch: _Epoch, batches: list[np.ndarray]) -> Iterator[Any]:
    options = epoch.options
    _transform(options, epoch.train)  # imports torchvision here, once, and not in every worker
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about more workers than processors: the user chose the number
        loader = DataLoader(
            epoch,
            batch_sampler=batches,  # type: ignore[arg-type]  # a list of arrays works
            num_workers=min(options.workers, len(batches)),
            collate_fn=_collate,
            pin_memory=torch.device(options.device).type == "cuda",
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # otherwise every epoch draws from torch's global generator
        )
        return iter(loader)


@dataclass(frozen=True)
class _Epoch(Dataset[Any]):
    """The images of one epoch by number; for a file that cannot be read, an error message."""

    images: Images
    options: DataOptions
    train: bool
    number: int

    def __len__(self) -> int:
        return len(self.images.names)

    def __getitem__(self, index: int) -> tuple[Tensor] | tuple[Tensor, int] | str:
        index = int(index)
        path = self.images.path(index)
        transform = _transform(self.options, self.train)
        try:
            image = _read(path)
        except Exception as error:  # PIL's decoders raise many types
            return f"{path}: cannot be read as an image: {cause(error)}"
        with torch.random.fork_rng(devices=()):
            # torchvision draws from this generator; torch.manual_seed would also seed the GPUs.
            torch.default_generator.manual_seed(seed_from("image", self.options.seed, self.number, index))
            pixels, labels = transform(image), self.images.labels
        return (pixels,) if labels is None else (pixels, int(labels[index]))


def _read(path: Path) -> Any:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unusual metadata, which some files of ImageNet have
        with path.open("rb") as file, Image.open(file) as image:
            if image.mode == "F":
                raise ValueError("its pixels are floating-point numbers: convert it to 8 or 16 bits")
            if image.mode[0] == "I":  # 16 bits, which PIL would cut off at 255
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")


@functools.lru_cache(maxsize=8)
def _transform(options: DataOptions, train: bool) -> Callable[[Any], Tensor]:
    """Random crop and flip for training, resize and centre crop for testing."""
    ready_torchvision()
    try:
        import PIL.Image  # noqa: F401
        from torchvision import transforms  # type: ignore[import-untyped]  # it has no types
    except ImportError as error:
        raise DataError("image folders need torchvision: pip install 'pwfn[timm]'") from error

    size = options.image_size or IMAGENET_SIZE
    mode = transforms.InterpolationMode(options.interpolation)
    if train and options.augment:
        steps = [transforms.RandomResizedCrop(size, interpolation=mode), transforms.RandomHorizontalFlip()]
    else:
        resized = math.floor(size / options.crop_pct + 1e-6)  # 224 / (224 / 232) is a little less than 232
        steps = [transforms.Resize(resized, interpolation=mode), transforms.CenterCrop(size)]
    chain: Callable[[Any], Tensor] = transforms.Compose([*steps, transforms.PILToTensor()])
    return chain


def _collate(examples: list[Any]) -> tuple[list[Tensor], list[str]]:
    """A batch of what could be read, and for each example why it could not, or an empty text.

    An exception from a worker would carry its traceback.
    """
    read = [example for example in examples if not isinstance(example, str)]
    errors = [example if isinstance(example, str) else "" for example in examples]
    return (default_collate(read) if read else []), errors


def _ignore_interrupts(_: int) -> None:
    """Ctrl-C reaches every process of a terminal; the main process handles it and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
