"""Images of a step on this rank: positions of their tokens, and the exchange of their features inside the domain."""

from functools import partial

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.image_shares import ImageShare
from longctx.data.packing import MicroBatch
from longctx.errors import UserError
from longctx.model.huggingface import TransformersModel
from longctx.model.protocol import Model
from longctx.model.vision import IN_BOTH_DIRECTIONS, Images, image_positions, is_vision
from longctx.parallel.all_to_all import exchange_rows
from longctx.parallel.mesh import Mesh
from longctx.planning.layout import Span


def images_of(micro_batch: MicroBatch, model: Model, mesh: Mesh) -> tuple[Images | None, torch.Tensor]:
    """Returns the images of a micro-batch, None if no rank has any, and the positions of its tokens on the device.

    These are [tokens], or [axes, tokens] if the model's own code gives tokens of images several positions.
    """
    share, positions = micro_batch.images, copy_to(micro_batch.positions, mesh.device)
    if share is None:
        return None, positions
    if not isinstance(model, TransformersModel) or not is_vision(model.hf):
        raise UserError(
            f"{type(model).__name__} reads no images, but documents have some: set model.from_pretrained to one that does"
        )
    pixels = {name: copy_to(value, mesh.device) for name, value in share.pixels.items()}
    images = Images(pixels, partial(_share, share, mesh.domain.get_group()))
    several = _positions(micro_batch, share, model)
    return images, positions if several is None else copy_to(several, mesh.device)


def blocks_of(micro_batch: MicroBatch, model: Model) -> dict[int, list[Span]]:
    """Returns the spans of images, by document, whose tokens see each other in both directions: of Gemma 3 all images."""
    share = micro_batch.images
    if share is None or not isinstance(model, TransformersModel) or model.hf.config.model_type not in IN_BOTH_DIRECTIONS:
        return {}
    return {
        document: [(place.start, place.start + place.tokens) for place in places] for document, places in share.places.items()
    }


def _share(share: ImageShare, group: dist.ProcessGroup, features: torch.Tensor) -> torch.Tensor:
    device, expected = features.device, len(share.sent_rows)
    if expected and len(features) != expected:
        raise UserError(
            f"the model makes {len(features)} features of images that have {expected} tokens in the store: prepare it with the "
            "processor of the model"
        )
    arrived = exchange_rows(features[copy_to(share.sent_rows, device)], share.sent, share.received, group)
    return arrived[copy_to(share.order, device)]


def _positions(micro_batch: MicroBatch, share: ImageShare, model: TransformersModel) -> torch.Tensor | None:
    """Returns the positions [axes, tokens] of this rank's rows; None if each token has one position."""
    found = None
    for shard in micro_batch.layout.shards:
        if shard.document not in share.places:
            continue
        whole = image_positions(model.hf, shard.length, share.places[shard.document])
        if whole is None:
            return None
        found = micro_batch.positions.expand(len(whole), -1).clone() if found is None else found
        held = torch.cat([whole[:, slice(*shard.head)], whole[:, slice(*shard.tail)]], dim=1)
        found[:, shard.offset : shard.offset + shard.tokens] = held
    return found
