"""Folders of images in ImageNet's layout, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``."""

from __future__ import annotations

import functools
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pwfn.config.seeds import seed_from
from pwfn.errors import DataError, cause
from pwfn.zoo.data.described import Data, DataOptions, fingerprint
from pwfn.zoo.data.epochs import Loader, epoch_order, shares
from pwfn.zoo.data.tensors import Normaliser

_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"))
_SAMPLED_FILES = 16  # whose bytes go into the fingerprint, of each split
_LAYOUT = "the layout is train/<class>/*.JPEG and val/<class>/*.JPEG"
_IMAGENET_SIZE = 224


@dataclass(frozen=True)
class Images:
    """Files below a folder, with the number of the class of each."""

    folder: Path
    names: np.ndarray  # bytes, below the folder: a million Python strings would be copied into each worker
    labels: np.ndarray

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(bytes(self.names[index]))

    def chosen(self, indices: np.ndarray) -> Images:
        """Some of them."""
        return Images(self.folder, self.names[indices], self.labels[indices])

    def facts(self) -> Iterator[Any]:
        """What tells these images from others: names, labels, and the content of a few files."""
        yield from (b"\n".join(self.names.tolist()), self.labels)
        for index in np.unique(np.linspace(0, len(self.names) - 1, _SAMPLED_FILES).astype(int)):
            try:
                yield self.path(int(index)).read_bytes()
            except OSError as error:
                raise DataError(f"{self.path(int(index))}: cannot be read: {cause(error)}") from error


def open_folder(name: str, directory: str, options: DataOptions) -> Data:
    """Training and test images of a folder; the training classes, sorted, are numbered from 0."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    if len(options.mean) not in (0, 3):
        raise DataError(
            f"{root}: images are read in 3 channels, mean and std have {len(options.mean)} numbers"
        )
    class_names = _class_names(root / "train")
    train = _scan(root / "train", class_names, class_names)
    kept, held = options.divide(name, len(train.names))
    if held is None:
        present = _class_names(root / "val")
        if unknown := sorted(set(present) - set(class_names)):
            raise DataError(f"{root / 'val' / unknown[0]}: this class has no folder in {root / 'train'}")
        test = _scan(root / "val", present, class_names)
    else:
        test = train.chosen(held)
    train = train.chosen(kept)
    options.check_divisible(name, len(train.names), len(test.names))
    size = options.image_size or _IMAGENET_SIZE
    return Data(
        name=name,
        train=ImageLoader(train, options, train=True),
        test=ImageLoader(test, options, train=False),
        classes=len(class_names),
        image_shape=(3, size, size),
        fingerprint=fingerprint("imagefolder", (class_names, *train.facts(), *test.facts())),
        train_size=len(train.names),
        test_size=len(test.names),
        class_names=class_names,
    )


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder.parent}: has no folder {folder.name!r}: {_LAYOUT}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder}: has no class folders: {_LAYOUT}")
    return tuple(names)


def _scan(folder: Path, present: tuple[str, ...], class_names: tuple[str, ...]) -> Images:
    number = {name: index for index, name in enumerate(class_names)}
    names: list[bytes] = []
    labels: list[int] = []
    for class_name in present:
        found = sorted(
            os.path.relpath(os.path.join(below, file), folder)
            for below, _, files in os.walk(folder / class_name, followlinks=True)
            for file in files
            if os.path.splitext(file)[1].lower() in _EXTENSIONS and file[0] != "."
        )
        if not found:
            raise DataError(f"{folder / class_name}: this class folder has no images")
        names += map(os.fsencode, found)
        labels += [number[class_name]] * len(found)
    return Images(folder, np.array(names), np.array(labels, dtype=np.int64))


class ImageLoader(Loader):
    """Batches of images read by worker processes, prepared there, normalised on the device.

    What is random about an image comes from (seed, epoch, its number) alone: how many workers
    there are and which of them reads it makes no difference.
    """

    def __init__(self, images: Images, options: DataOptions, *, train: bool) -> None:
        self.images, self.options, self.train = images, options, train
        size = options.batch_size if train else options.test_batch_size or options.batch_size
        self._shares = shares(len(images.names), size, options.rank, options.world, exact=not train)
        self._normalise = Normaliser(options.mean, options.std, torch.device(options.device))

    def __len__(self) -> int:
        return len(self._shares)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number``, from batch ``start`` on; those before are not read."""
        options, device = self.options, torch.device(self.options.device)
        order = epoch_order(len(self.images.names), options.seed, number, shuffle=self.train).numpy()
        batches = [order[share] for share in self._shares[start:]]
        if not batches:
            return
        _transform(options, self.train)  # torchvision is imported once, not in every worker
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than processors: the user chose them
            loader = DataLoader(
                _Epoch(self.images, options, self.train, number),
                batch_sampler=batches,  # type: ignore[arg-type]  # lists of positions will do
                num_workers=min(options.workers, len(batches)),
                collate_fn=_collate,
                pin_memory=device.type == "cuda",
                worker_init_fn=_begin_worker,
                generator=torch.Generator(),  # else every epoch would draw from torch's global state
            )
            reader = iter(loader)
        try:
            for batch in reader:
                if isinstance(batch, str):  # an error that crossed from a worker would bring its traceback
                    raise DataError(batch)
                images, targets = (part.to(device, non_blocking=True) for part in batch)
                yield self._normalise(images), targets
        finally:
            del reader  # ends the workers now, though an error may keep this frame for long


@dataclass(frozen=True)
class _Epoch(Dataset[Any]):
    """The images of one epoch by their number; a file that cannot be read gives a sentence."""

    images: Images
    options: DataOptions
    train: bool
    number: int

    def __len__(self) -> int:
        return len(self.images.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        index = int(index)
        path = self.images.path(index)
        transform = _transform(self.options, self.train)
        try:
            image = _read(path)
        except Exception as error:  # PIL's decoders raise many kinds
            return f"{path}: cannot be read as an image: {cause(error)}"
        with _drawing_from(seed_from("image", self.options.seed, self.number, index)):
            return transform(image), int(self.images.labels[index])


def _read(path: Path) -> Any:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata, which some of ImageNet's files have
        with path.open("rb") as file, Image.open(file) as image:
            return image.convert("RGB")


@functools.lru_cache(maxsize=8)
def _transform(options: DataOptions, train: bool) -> Callable[[Any], Tensor]:
    """Random crop and flip for training, resized centre crop for testing; made in each worker."""
    from pwfn.zoo.models import ready_torchvision

    ready_torchvision()
    try:
        import PIL.Image  # noqa: F401
        from torchvision import transforms  # type: ignore[import-untyped]  # it has no types
    except ImportError as error:
        raise DataError("image folders need torchvision: pip install 'pwfn[timm]'") from error

    size = options.image_size or _IMAGENET_SIZE
    mode = transforms.InterpolationMode(options.interpolation)
    if train and options.augment:
        steps = [transforms.RandomResizedCrop(size, interpolation=mode), transforms.RandomHorizontalFlip()]
    else:
        resized = math.floor(size / options.crop_pct)
        steps = [transforms.Resize(resized, interpolation=mode), transforms.CenterCrop(size)]
    chain: Callable[[Any], Tensor] = transforms.Compose([*steps, transforms.PILToTensor()])
    return chain


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """torchvision draws from torch's global generator of the CPU: within the block it has this seed."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _collate(examples: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    good = []
    for example in examples:
        if isinstance(example, str):
            return example
        good.append(example)
    return torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good])


def _begin_worker(_: int) -> None:
    """Ctrl-C reaches every process of a terminal: the run's own answers it, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
