"""Models of torchvision, each class with a small configuration. Imports torchvision."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.regnet import BlockParams

from tests.parallel.kinds.kind import Kind
from tests.parallel.kinds.plain import WHOLE

CLASSES = 5


def images(rows: int, *, side: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, side, side), torch.randint(0, CLASSES, (rows,))


#: On 32 x 32 images, the last normalisations of these models see so few numbers that they amplify each rounding error.
LARGE = partial(images, side=96)


def maps(rows: int) -> tuple[Tensor, Tensor]:
    """Images, and the class of each pixel; some do not count."""
    target = torch.randint(0, CLASSES, (rows, 32, 32)).masked_fill(torch.rand(rows, 32, 32) < 0.2, -100)
    return torch.randn(rows, 3, 32, 32), target


def films(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 4, 16, 16), torch.randint(0, CLASSES, (rows,))


def sgd(params: Any) -> torch.optim.Optimizer:
    """AdamW would make as much of a rounding error as of a gradient, and a bias before a normalisation has only the former."""
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def kind(
    path: str, *args: Any, batch: Any = images, loss: Any = F.cross_entropy, refused: Any = None, **options: Any
) -> Kind:
    """A class or function of torchvision.models, with these arguments."""
    make = made(path, *args, **options)
    return Kind(make=make, batch=batch, loss=loss, optimizer=sgd, refused=refused or {})


def made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(f"torchvision.models.{module}"), name)
        model: nn.Module = found(*args, **({"num_classes": CLASSES} | options))
        return model.train()

    return make


def resnet(block: str, layers: tuple[int, ...] = (1, 1, 1, 1), **options: Any) -> Kind:
    from torchvision.models import resnet as module

    return kind("resnet.ResNet", getattr(module, block), list(layers), **options)


def efficientnet(*blocks: Any) -> Kind:
    return kind("efficientnet.EfficientNet", list(blocks), dropout=0.0, stochastic_depth_prob=0.0, last_channel=32)


def mobilenet_v3(arch: str) -> Kind:
    from torchvision.models.mobilenetv3 import _mobilenet_v3_conf

    blocks, _ = _mobilenet_v3_conf(arch, width_mult=0.25)
    return kind("mobilenetv3.MobileNetV3", blocks, 32, dropout=0.0)


def regnet(**options: Any) -> Kind:
    blocks = BlockParams.from_init_params(depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8, **options)
    return kind("regnet.RegNet", blocks, stem_width=8)


def shufflenet(**options: Any) -> Kind:
    return kind("shufflenetv2.ShuffleNetV2", [1, 2, 1], [8, 16, 32, 64, 64], **options)


def convnext() -> Kind:
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return kind("convnext.ConvNeXt", blocks, stochastic_depth_prob=0.0, layer_scale=0.5)


def swin(version: str, **options: Any) -> Kind:
    from torchvision.models import swin_transformer as module

    if version == "v2":
        options |= {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return kind(
        "swin_transformer.SwinTransformer", [2, 2], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, **options
    )


class _Backbone(nn.Module):
    """Two places of a small network, by the names that torchvision's segmentation asks for."""

    def __init__(self, first: str = "aux", last: str = "out") -> None:
        super().__init__()
        self.first, self.last = first, last
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.stem(x)
        return OrderedDict([(self.first, low), (self.last, self.body(low))])


def _with_aux(output: dict[str, Tensor], target: Tensor) -> Tensor:
    loss = F.cross_entropy(output["out"], target)
    return loss + 0.5 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


def _counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def segmented(which: str) -> Kind:
    def make() -> nn.Module:
        from torchvision.models import segmentation as module

        if which == "lraspp":
            return module.lraspp.LRASPP(_Backbone("low", "high"), 8, 16, CLASSES, inter_channels=8)
        aux = module.fcn.FCNHead(8, CLASSES)
        if which == "fcn":
            model: nn.Module = module.fcn.FCN(_Backbone(), module.fcn.FCNHead(16, CLASSES), aux)
        else:
            head = module.deeplabv3.DeepLabHead(16, CLASSES, atrous_rates=(2, 4))
            model = module.deeplabv3.DeepLabV3(_Backbone(), head, aux)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return model

    return Kind(make=make, batch=maps, loss=_with_aux, loss_weight=_counted, optimizer=sgd, refused={"tensor": WHOLE})


def google_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target) + 0.3 * sum(
        F.cross_entropy(aux, target) for aux in (output.aux_logits1, output.aux_logits2)
    )


def mvit() -> Kind:
    from torchvision.models.video.mvit import MSBlockConfig

    def block(heads: int, width: int, out: int, stride: list[int]) -> Any:
        return MSBlockConfig(heads, width, out, [3, 3, 3], [3, 3, 3], stride, [1, 2, 2])

    blocks = [block(1, 16, 32, [1, 1, 1]), block(2, 32, 32, [1, 2, 2])]
    return kind(
        "video.mvit.MViT",
        *((16, 16), 4, blocks),
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        dropout=0.0,
        batch=films,
    )


MB, FUSED = MBConvConfig, FusedMBConvConfig
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}

TORCHVISION: dict[str, Kind] = {
    "resnet-basic": resnet("BasicBlock"),
    "resnet-bottleneck": resnet("Bottleneck", width_per_group=4),
    "resnet-zero-init": resnet("Bottleneck", width_per_group=4, zero_init_residual=True),
    "resnext": resnet("Bottleneck", groups=4, width_per_group=4),
    "wide-resnet": resnet("Bottleneck", width_per_group=8),
    "resnet-dilated": resnet("Bottleneck", width_per_group=4, replace_stride_with_dilation=[False, True, True]),
    "resnet-group-norm": resnet("BasicBlock", norm_layer=partial(nn.GroupNorm, 4)),
    "densenet": kind("densenet.DenseNet", 4, (2, 2), 8, 2),
    "densenet-deep": kind("densenet.DenseNet", 4, (2, 3, 2), 8, 2),
    "densenet-checkpointed": kind(
        *("densenet.DenseNet", 4, (2, 2), 8, 2),
        memory_efficient=True,
        refused={"pipe": "call torch.utils.checkpoint.*recompute='blocks'"},
    ),
    "googlenet": kind(
        "googlenet.GoogLeNet",
        init_weights=False,
        dropout=0.0,
        dropout_aux=0.0,
        loss=google_loss,
        batch=partial(images, side=64),
    ),
    "googlenet-without-aux": kind(
        "googlenet.GoogLeNet", init_weights=False, dropout=0.0, aux_logits=False, transform_input=True
    ),
    "mobilenet-v2": kind("mobilenetv2.MobileNetV2", width_mult=0.25, dropout=0.0, batch=LARGE),
    "mobilenet-v2-wider": kind("mobilenetv2.MobileNetV2", width_mult=0.35, round_nearest=4, dropout=0.0, batch=LARGE),
    "mobilenet-v3-small": mobilenet_v3("mobilenet_v3_small"),
    "mobilenet-v3-large": mobilenet_v3("mobilenet_v3_large"),
    "efficientnet": efficientnet(MB(1, 3, 1, 8, 8, 1), MB(6, 5, 2, 8, 16, 2), MB(6, 3, 2, 16, 24, 2)),
    "efficientnet-v2": efficientnet(FUSED(1, 3, 1, 8, 8, 1), FUSED(4, 3, 2, 8, 16, 2), MB(4, 3, 2, 16, 24, 2)),
    "mnasnet": kind("mnasnet.MNASNet", 0.25, dropout=0.0, batch=LARGE),
    "mnasnet-wider": kind("mnasnet.MNASNet", 0.5, dropout=0.0, batch=LARGE),
    "shufflenet-v2": shufflenet(),
    "squeezenet-1-0": kind("squeezenet.SqueezeNet", "1_0", dropout=0.0, refused={"tensor": WHOLE}),
    "squeezenet-1-1": kind("squeezenet.SqueezeNet", "1_1", dropout=0.0, refused={"tensor": WHOLE}),
    "regnet-x": regnet(),
    "regnet-y": regnet(se_ratio=0.25),
    "convnext": convnext(),
    "vit": kind("vision_transformer.VisionTransformer", **VIT),
    "vit-with-representation": kind("vision_transformer.VisionTransformer", **VIT, representation_size=16),
    "swin": swin("v1"),
    "swin-v2": swin("v2"),
    "maxvit": kind("maxvit.MaxVit", (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0),
    "fcn": segmented("fcn"),
    "deeplab-v3": segmented("deeplab"),
    "lraspp": segmented("lraspp"),
    "swin-3d": kind(
        "video.swin_transformer.SwinTransformer3d",
        *([2, 4, 4], 16, [2, 2], [2, 4], [2, 2, 2]),
        stochastic_depth_prob=0.0,
        batch=films,
    ),
    "mvit": mvit(),
}
