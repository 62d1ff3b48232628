"""Mapping between observations and the requests of a server: keys, images, the instruction, the action."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree
import yaml

from rl_eval.errors import ConfigError, check_known
from rl_eval.integrations.openpi.greeting import key_of
from rl_eval.integrations.policy_files import reading

_KEY: Final = "policy.policy_kwargs.mapping"
_CHANNELS: Final = (1, 3, 4)


def _image(*key: str, layout: str = "hwc") -> dict[str, Any]:
    return {"key": list(key), "size": [224, 224], "layout": layout}


READY: Final[Mapping[str, Mapping[str, Any]]] = {
    "aloha": {
        **{name: _image("images", name, layout="chw") for name in ("cam_high", "cam_low")},
        **{name: _image("images", name, layout="chw") for name in ("cam_left_wrist", "cam_right_wrist")},
        "state": "state",
    },
    "droid": {
        **{name: _image(f"observation/{name}") for name in ("exterior_image_1_left", "wrist_image_left")},
        **{name: f"observation/{name}" for name in ("joint_position", "gripper_position")},
    },
    "libero": {
        **{name: _image(f"observation/{name}") for name in ("image", "wrist_image")},
        "state": "observation/state",
    },
}
"""Observations of openpi's published robots: the last part of a leaf's path, and its key in a request."""


class _Part(NamedTuple):
    """One key of a request."""

    leaf: int
    """Position of the leaf in the flat observation."""
    key: tuple[str, ...]
    size: tuple[int, int] | None = None
    """Height and width of an image; None for a leaf that is sent as it is."""
    layout: str = "hwc"


@final
class Requests:
    """Requests for the rows of a batch of observations.

    Args:
        mapping: A name in :data:`READY`, a YAML file, or None to send each leaf by its path.
        prompt: Instruction that every request gets; None for that of the file.
        space: Space of one observation.

    Raises:
        ConfigError: The mapping does not fit the observations.
    """

    def __init__(self, mapping: str | None, prompt: str | None, space: gym.Space[Any]) -> None:
        leaves = [(key_of(path), leaf) for path, leaf in tree.flatten_with_path(_plain(space))]
        given: Mapping[str, Any] = {} if mapping is None or mapping in READY else _read(mapping)
        self.action: str = given.get("action", "actions")
        self._prompt = given.get("prompt") if prompt is None else prompt
        if mapping is None:
            wanted: dict[str, Any] = {name: name for name, _ in leaves}
        elif mapping in READY:
            ready = {**READY[mapping], "prompt": "prompt"}
            wanted = {name: one for name, _ in leaves if (one := ready.get(name.rpartition("/")[2])) is not None}
            given = {"observation": ready}
        else:
            wanted = dict(given.get("observation") or {})
        names = [name for name, _ in leaves]
        if wrong := sorted(set(names) ^ set(wanted)):
            problem = (
                f"the mapping {mapping} does not fit the observation in {', '.join(wrong)}: the observation has the "
                f"leaves {', '.join(names)}, and the mapping has {', '.join(given['observation'])}"
            )
            fix = "Give each leaf of the observation a key of the request, or null to leave it out."
            raise ConfigError(problem, key=_KEY, value=mapping, fix=fix)
        self._parts = [
            _part(place, name, leaf, wanted[name])
            for place, (name, leaf) in enumerate(leaves)
            if wanted[name] is not None
        ]
        self.keys = ["/".join(one.key) for one in self._parts] + ["prompt"] * (self._prompt is not None)

    def of(self, observations: Any) -> list[dict[str, Any]]:
        """Return the request of each row of a batch."""
        leaves = tree.flatten(observations)
        return [self._request(leaves, row) for row in range(len(leaves[0]))]

    def _request(self, leaves: list[npt.NDArray[Any]], row: int) -> dict[str, Any]:
        request: dict[str, Any] = {} if self._prompt is None else {"prompt": self._prompt}
        for leaf, key, size, layout in self._parts:
            value = leaves[leaf][row]
            if isinstance(value, np.str_):
                value = str(value)
            elif size is not None:
                value = _converted(value, size, layout)
            place = request
            for name in key[:-1]:
                place = place.setdefault(name, {})
            place[key[-1]] = value
        return request


def _plain(space: gym.Space[Any]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _plain(part) for name, part in space.spaces.items()}
    return tuple(map(_plain, space.spaces)) if isinstance(space, gym.spaces.Tuple) else space


def _read(mapping: str) -> Mapping[str, Any]:
    advice = f"Name one of {', '.join(READY)}, or a file with the keys observation, prompt and action."
    with reading("mapping", mapping, "a mapping of observations", advice):
        given = yaml.safe_load(Path(mapping).expanduser().read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not isinstance(given.get("observation"), dict):
            raise TypeError("observation is not a mapping of leaves to keys")
    for key in given:
        check_known(_KEY, key, ("observation", "prompt", "action"))
    return given


def _part(place: int, name: str, leaf: gym.Space[Any], wanted: Any) -> _Part:
    """Return the part of the request for a leaf: ``KEY``, or ``{key: KEY, size: [H, W], layout: hwc}`` for an image."""
    section = wanted if isinstance(wanted, dict) else {"key": wanted}
    for key in section:
        check_known(_KEY, key, ("key", "size", "layout"))
    key = section.get("key")
    keys = (key,) if isinstance(key, str) else tuple(key or ())
    if not keys or not all(isinstance(one, str) for one in keys):
        raise ConfigError(f"the mapping of {name} has no key of the request", key=_KEY, value=str(wanted))
    if "size" not in section and "layout" not in section:
        return _Part(place, keys)
    shape, layout = leaf.shape or (), section.get("layout", "hwc")
    check_known(_KEY, layout, ("hwc", "chw"))
    if len(shape) != 3 or not {shape[0], shape[2]} & set(_CHANNELS):
        raise ConfigError(f"the leaf {name} is not an image, but {leaf}", key=_KEY, value=str(wanted))
    now = shape[:2] if shape[2] in _CHANNELS else shape[1:]
    size = tuple(section.get("size") or now)
    if size != now:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            problem = f"the image {name} has the size {now}, but the mapping says {size}"
            fix = "Run pip install pillow, with which rl_eval resizes images as openpi does, or render in this size."
            raise ConfigError(problem, key=_KEY, value=str(size), fix=fix) from error
    return _Part(place, keys, size, layout)


def _converted(image: npt.NDArray[Any], size: tuple[int, int], layout: str) -> npt.NDArray[np.uint8]:
    """Return an image of unsigned bytes in a size and layout, resized as openpi's client does."""
    if image.shape[2] not in _CHANNELS:
        image = image.transpose(1, 2, 0)
    if image.dtype.kind == "f":
        image = (255 * image).astype(np.uint8)
    if image.shape[:2] != size:
        image = _resized(image, size)
    return image.transpose(2, 0, 1) if layout == "chw" else image


def _resized(image: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Resize an image without distortion, and pad it with zeros."""
    from PIL import Image

    (height, width), (high, wide) = image.shape[:2], size
    ratio = max(width / wide, height / high)
    small = int(width / ratio), int(height / ratio)
    flat = image[:, :, 0] if image.shape[2] == 1 else image
    resized = np.asarray(Image.fromarray(flat).resize(small, Image.Resampling.BILINEAR)).reshape(
        small[1], small[0], image.shape[2]
    )
    padded = np.zeros((high, wide, image.shape[2]), np.uint8)
    top, left = int((high - small[1]) / 2), int((wide - small[0]) / 2)
    padded[top : top + small[1], left : left + small[0]] = resized
    return padded
