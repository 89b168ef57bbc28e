"""Video processor: sizes and pixels of frames, as a checkpoint's own processor of videos makes them.

That processor needs torchvision, which resizes by torch's own interpolation; so does this. Two frames make a patch in time, and
the encoder's attention stays inside such a pair. So a pair is encoded alone, as an image is, by any rank. Files are decoded by
PyAV, as one of transformers' own ways is.
"""

import importlib.util
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.data.chat import ChatError
from longctx.data.image_sources import Video
from longctx.errors import brief, install
from longctx.planning.image_work import Grid
from longctx.tokenizer_files import read_json

if TYPE_CHECKING:
    import torch

_NEEDED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_EXPECTED = {"resample": 3, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
"""Settings of a processor that may be left out, and otherwise must have these values."""


class VideoProcessor:
    """Processor of videos by the files in a folder; those of images are read if there are none of videos, as by transformers.

    `of_all`: unless the files name a class, limits are on the pixels of all frames, as for Qwen3-VL, not on those of each.
    Raises ChatError if a setting is missing, or has a value that is not supported.
    """

    def __init__(self, folder: Path, of_all: bool = False) -> None:
        files = (read_json(folder / f"{kind}preprocessor_config.json") for kind in ("video_", ""))
        nested = read_json(folder / "processor_config.json").get("video_processor")
        settings: dict[str, Any] = nested or next(filter(None, files), {})
        self.size = dict(settings.get("size") or {})
        for edge, pixels in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            self.size[edge] = settings.get(pixels) or self.size.get(edge)
        self._settings = settings
        kind = settings.get("video_processor_type") or settings.get("image_processor_type") or ""
        self._is_limited_as_one = kind.startswith("Qwen3VL") or (of_all and not kind.startswith("Qwen2VL"))
        missing = [name for name in _NEEDED if not settings.get(name)] + [key for key, value in self.size.items() if not value]
        if missing:
            raise ChatError(f"{folder} has no processor of videos: {', '.join(missing)} is not in its settings")
        wrong = {name: value for name, value in settings.items() if value != _EXPECTED.get(name, value)}
        wrong |= {"cap_pixels_per_frame": True} if settings.get("cap_pixels_per_frame") else {}
        if wrong:
            raise ChatError(f"the processor of videos in {folder} has {wrong}, which is not supported: use its defaults")
        self.patch_size, self.temporal_patch_size, self.merge_size = (int(settings[name]) for name in _NEEDED[:3])
        self.mean, self.std = settings["image_mean"], settings["image_std"]
        self.factor = settings.get("rescale_factor", 1 / 255)

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """Returns time, height and width in patches. Raises ChatError."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_all

        limits = {"min_pixels": self.size["shortest_edge"], "max_pixels": self.size["longest_edge"]}
        limits["factor"] = self.patch_size * self.merge_size
        try:
            if self._is_limited_as_one:
                size = resize_all(frames, height, width, temporal_factor=self.temporal_patch_size, **limits)
            else:
                size = smart_resize(height, width, **limits)
        except ValueError as error:
            raise ChatError(f"a video of {frames} frames of {width} × {height} pixels is refused: {error}") from error
        return -(-frames // self.temporal_patch_size), size[0] // self.patch_size, size[1] // self.patch_size

    def decoded(self, video: Video) -> Video:
        """Returns a video with the frames of its file that the checkpoint's own processor takes, as PNGs.

        They are stored at the size at which they are encoded. Raises ChatError.
        """
        import torch
        from PIL import Image
        from transformers.video_utils import read_video_pyav

        (file,), every = video.frames, partial(self._sampled, fps=video.fps)
        if importlib.util.find_spec("av") is None:
            raise ChatError(f"reading {file} needs PyAV: {install('video')}, or give the frames as images")
        try:
            found, metadata = read_video_pyav(str(file), every)
            if len(found) != len(metadata.frames_indices):
                raise ValueError(f"it has fewer than the {metadata.total_num_frames} frames that it tells")
        except Exception as error:  # PyAV raises many kinds for damaged files
            raise ChatError(f"{file} cannot be read as a video: {brief(error)}; give its frames as images") from error
        count, height, width, _ = found.shape
        size = self.grid(count, height, width)
        frames = torch.from_numpy(found).permute(0, 3, 1, 2)
        smaller = self._resized(frames, size)
        if self.grid(count, smaller.shape[-2], smaller.shape[-1]) == size:  # then they are not resized again
            frames = smaller
        pngs = []
        for frame in frames.permute(0, 2, 3, 1).numpy():
            Image.fromarray(frame).save(written := io.BytesIO(), "png")
            pngs.append(written.getvalue())
        return Video(tuple(pngs), metadata.fps, tuple(map(int, metadata.frames_indices)), metadata.total_num_frames)

    def _sampled(self, metadata: Any, fps: float) -> Any:
        """Returns the numbers of the frames to take of a file: those of `fps` a second; 0: as the processor's settings say."""
        import torch
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        get, total, turn = self._settings.get, metadata.total_num_frames, self.temporal_patch_size
        if total < 1:
            raise ValueError("it does not tell its number of frames")
        if not (fps or get("do_sample_frames", self._is_limited_as_one)):
            return np.arange(total)
        limits = SimpleNamespace(fps=get("fps", 2), min_frames=get("min_frames", 4), max_frames=get("max_frames", 768))
        if self._is_limited_as_one:
            return Qwen3VLVideoProcessor.sample_frames(limits, metadata, None if fps else get("num_frames"), fps or None)
        most = min(limits.max_frames, total) // turn * turn  # as `sample_frames` of Qwen2-VL
        taken = int(min(max(total / metadata.fps * (fps or limits.fps), limits.min_frames), most, total) // turn) * turn
        if not taken:
            raise ValueError(f"it has only {total} frames")
        indices = torch.arange(0, total, total / taken).int().numpy()
        return indices[indices < total]  # rounding may add one

    def _resized(self, video: "torch.Tensor", grid: Grid) -> "torch.Tensor":
        """Returns frames [.., 3, height, width] at the size of a grid of patches."""
        import torch

        size = [edge * self.patch_size for edge in grid[1:]]
        if list(video.shape[-2:]) == size:
            return video
        return torch.nn.functional.interpolate(video, size, mode="bicubic", align_corners=False, antialias=True)

    def pixels(self, frames: Sequence[Any], grid: Grid) -> "torch.Tensor":
        """Returns the patches [height · width, values] of the frames of one patch in time, in a grid of (1, height, width)."""
        import torch

        patch, merge = self.patch_size, self.merge_size
        video = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).contiguous()
        mean, std = (torch.tensor(value).view(-1, 1, 1) * (1.0 / self.factor) for value in (self.mean, self.std))
        values = self._resized(video, grid).float().sub_(mean).div_(std)
        blocks = values.view(len(frames), 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
        return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(grid[1] * grid[2], -1)
