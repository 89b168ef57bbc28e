"""Video processor: sizes and pixels of frames, as a checkpoint's own processor of videos makes them.

That processor needs torchvision, which resizes by torch's own interpolation; so does this. Two frames make a patch in time, and
the encoder's attention stays inside such a pair. So a pair is encoded alone, as an image is, by any rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.data.chat import ChatError
from longctx.planning.image_work import Grid
from longctx.tokenizer_files import read_json

if TYPE_CHECKING:
    import torch

_NEEDED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_EXPECTED = {"resample": 3, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
"""Settings of a processor that may be left out, and otherwise must have these values."""


class VideoProcessor:
    """Processor of videos by the files in a folder; those of images are read if there are none of videos, as by transformers.

    Raises ChatError if a setting is missing, or has a value that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        files = (read_json(folder / f"{kind}preprocessor_config.json") for kind in ("video_", ""))
        nested = read_json(folder / "processor_config.json").get("video_processor")
        settings: dict[str, Any] = nested or next(filter(None, files), {})
        self.size = dict(settings.get("size") or {})
        for edge, pixels in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            self.size[edge] = settings.get(pixels) or self.size.get(edge)
        self.kind = settings.get("video_processor_type") or settings.get("image_processor_type") or ""
        missing = [name for name in _NEEDED if not settings.get(name)] + [key for key, value in self.size.items() if not value]
        if missing:
            raise ChatError(f"{folder} has no processor of videos: {', '.join(missing)} is not in its settings")
        wrong = {name: value for name, value in settings.items() if value != _EXPECTED.get(name, value)}
        wrong |= {"cap_pixels_per_frame": True} if settings.get("cap_pixels_per_frame") else {}
        if wrong:
            raise ChatError(f"the processor of videos in {folder} has {wrong}, which is not supported: use its defaults")
        self.patch_size, self.temporal_patch_size, self.merge_size = (int(settings[name]) for name in _NEEDED[:3])
        self.mean, self.std, self.factor = (
            settings["image_mean"],
            settings["image_std"],
            settings.get("rescale_factor", 1 / 255),
        )

    def grid(self, frames: int, height: int, width: int, of_all: bool) -> Grid:
        """Returns time, height and width in patches.

        `of_all`: unless the files name a class, limits are on the pixels of all frames, as for Qwen3-VL, not on those of each.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_all

        limits = {"min_pixels": self.size["shortest_edge"], "max_pixels": self.size["longest_edge"]}
        limits["factor"] = self.patch_size * self.merge_size
        try:
            if self.kind.startswith("Qwen3VL") or (of_all and not self.kind.startswith("Qwen2VL")):
                size = resize_all(frames, height, width, temporal_factor=self.temporal_patch_size, **limits)
            else:
                size = smart_resize(height, width, **limits)
        except ValueError as error:
            raise ChatError(f"a video of {frames} frames of {width} × {height} pixels is refused: {error}") from error
        return -(-frames // self.temporal_patch_size), size[0] // self.patch_size, size[1] // self.patch_size

    def pixels(self, frames: Sequence[Any], grid: Grid) -> "torch.Tensor":
        """Returns the patches [height · width, values] of the frames of one patch in time, in a grid of (1, height, width)."""
        import torch

        size, patch, merge = [edge * self.patch_size for edge in grid[1:]], self.patch_size, self.merge_size
        video = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).contiguous()
        if list(video.shape[-2:]) != size:
            video = torch.nn.functional.interpolate(video, size, mode="bicubic", align_corners=False, antialias=True)
        mean, std = (torch.tensor(value).view(-1, 1, 1) * (1.0 / self.factor) for value in (self.mean, self.std))
        values = video.float().sub_(mean).div_(std)
        blocks = values.view(len(frames), 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
        return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(grid[1] * grid[2], -1)
