"""Published architectures, rebuilt small in the ways in which their authors wrote them. Imports torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.parallel.kinds.kind import Kind
from tests.parallel.kinds.plain import WHOLE

WORDS, LENGTH, WIDTH, CLASSES = 17, 6, 16, 5


# Functions that make batches


def classes(rows: int) -> Tensor:
    return torch.randint(0, CLASSES, (rows,))


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), classes(rows)


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 16, 16), classes(rows)


def maps(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 16, 16), torch.randint(0, CLASSES, (rows, 16, 16))


def same(rows: int) -> tuple[Tensor, Tensor]:
    """Return images that the model has to reproduce."""
    x = torch.rand(rows, 3, 16, 16)
    return x, x.clone()


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, WORDS, (rows, LENGTH)), classes(rows)


def next_tokens(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, WORDS, (rows, LENGTH + 1))
    return drawn[:, :-1], drawn[:, 1:].clone()


def translated(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.randint(0, WORDS, (rows, LENGTH))
    return torch.randint(0, WORDS, (rows, LENGTH)), drawn[:, :-1], drawn[:, 1:].clone()


def waves(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1, 64), classes(rows)


def series(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 24, 3), torch.randn(rows, 8, 3)


def spoken(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 20, 8), torch.randint(1, CLASSES, (rows, 4))


def table(rows: int) -> dict[str, Tensor]:
    """Numbers and categories, as recommenders have them."""
    return {
        "numbers": torch.randn(rows, 4),
        "categories": torch.randint(0, 7, (rows, 3)),
        "labels": torch.randint(0, 2, (rows,)).double(),
    }


def graphs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seven nodes each, and whether two are neighbours."""
    near = (torch.rand(rows, 7, 7) < 0.4).double()
    return torch.randn(rows, 7, 8), ((near + near.transpose(1, 2)) > 0).double(), classes(rows)


def points(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 10, 3), classes(rows)


def rays(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Origins, directions and colours."""
    return torch.randn(rows, 3), F.normalize(torch.randn(rows, 3), dim=1), torch.rand(rows, 3)


def places(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 2)
    return x, x.sum(1, keepdim=True).sin()


def noised(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, their times, and the noise."""
    return torch.randn(rows, 3, 16, 16), torch.randint(0, 100, (rows,)), torch.randn(rows, 3, 16, 16)


# Loss functions


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def click(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.squeeze(-1), target)


def heard(output: Tensor, target: Tensor) -> Tensor:
    """CTC, of as many places in each row."""
    rows, length = output.shape[:2]
    logits = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, target, torch.full((rows,), length), torch.full((rows,), target.shape[1]))


def sgd(params: Any) -> torch.optim.Optimizer:
    """AdamW would make as much of a rounding error as of a gradient, and a bias before a normalisation has only the former."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


# Parts of several models


def mlp(*widths: int, last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (own, following) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(own, following))
        if last or place < len(widths) - 2:
            layers.append(nn.GELU())
    return nn.Sequential(*layers)


def conv(own: int, following: int, size: int = 3, stride: int = 1, **options: Any) -> nn.Sequential:
    padding = size // 2 * options.get("dilation", 1)
    layer = nn.Conv2d(own, following, size, stride, padding, bias=False, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(following), nn.ReLU(inplace=True))


class Pooled(nn.Module):
    """A body that keeps places, and a head on their mean."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(2).mean(2))


class Plus(nn.Module):
    """A residual connection around parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.fn = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(x)


class Turned(nn.Module):
    """Two dimensions in each other's place around a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.transpose(1, 2)).transpose(1, 2)


# Models for images


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 32), nn.Linear(32, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def alexnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(inplace=True), nn.LocalResponseNorm(3), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Dropout(0.0), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, CLASSES)),
    )


def vgg(*, normalised: bool) -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for step in (8, 8, 0, 16, 16, 0, 16, 0):
        if not step:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers.append(nn.Conv2d(width, step, 3, padding=1))
        layers += [nn.BatchNorm2d(step)] * normalised + [nn.ReLU(inplace=True)]
        width = step
    return nn.Sequential(*layers, nn.Flatten(), mlp(64, 32, CLASSES))


def network_in_network() -> nn.Module:
    def block(own: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(own, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 8), *block(8, CLASSES), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Inception(nn.Module):
    """Four ways whose channels are put together, and an auxiliary head in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, stride=2)
        self.a = nn.ModuleList([self._block(8), self._block(16)])
        self.aux, self.fc = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def _block(self, width: int) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "one": conv(width, 4, 1),
                "three": nn.Sequential(conv(width, 4, 1), conv(4, 4)),
                "five": nn.Sequential(conv(width, 4, 1), conv(4, 4, 5)),
                "pool": nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(width, 4, 1)),
            }
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x, aux = self.stem(x), None
        for place, block in enumerate(self.a):
            x = torch.cat([way(x) for way in block.values()], 1)
            if place == 0 and self.training:
                aux = self.aux(x.mean((2, 3)))
        return self.fc(x.mean((2, 3))), aux


def with_aux(output: tuple[Tensor, Tensor | None], target: Tensor) -> Tensor:
    loss = F.cross_entropy(output[0], target)
    return loss if output[1] is None else loss + 0.4 * F.cross_entropy(output[1], target)


def xception() -> nn.Module:
    def separable(own: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.ReLU(), nn.Conv2d(own, own, 3, padding=1, groups=own, bias=False), conv(own, out, 1))

    return Pooled(
        nn.Sequential(conv(3, 8, stride=2), Plus(separable(8, 8)), separable(8, 16), Plus(separable(16, 16))), 16
    )


class Squeeze(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = mlp(width, width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean((2, 3))))[:, :, None, None]


class Attentive(nn.Module):
    """CBAM: of channels by their mean and maximum, then of places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.place = mlp(width, width // 4, width), nn.Conv2d(2, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.fc(x.mean((2, 3))) + self.fc(x.amax((2, 3)))
        x = x * weights.sigmoid()[..., None, None]
        summed = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * self.place(summed).sigmoid()


class Ghost(nn.Module):
    def __init__(self, own: int, out: int) -> None:
        super().__init__()
        self.primary = conv(own, out // 2, 1)
        self.cheap = conv(out // 2, out // 2, groups=out // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(x)
        return torch.cat([x, self.cheap(x)], dim=1)


class Nested(nn.Module):
    """UNet++: intermediate values are kept in a dict by position."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 8, 16)
        self.down = nn.ModuleList([conv(own, out) for own, out in zip((3, *widths), widths, strict=False)])
        self.up = nn.ModuleDict({"0_1": conv(12, 4), "1_1": conv(24, 8), "0_2": conv(16, 4)})
        self.last = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {}
        for depth, block in enumerate(self.down):
            x = found[f"{depth}_0"] = block(F.max_pool2d(x, 2) if depth else x)
        for name, block in self.up.items():
            row, column = map(int, name.split("_"))
            below = F.interpolate(found[f"{row + 1}_{column - 1}"], scale_factor=2, mode="nearest")
            found[name] = block(torch.cat([*(found[f"{row}_{k}"] for k in range(column)), below], 1))
        return self.last(found["0_2"])


class SegNet(nn.Module):
    """Puts numbers back where the maxima were."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = conv(3, 8), conv(8, 8), nn.Conv2d(8, CLASSES, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x, places = self.pool(self.one(x))
        return self.three(self.unpool(self.two(x), places))


class Pyramid(nn.Module):
    """PSPNet: means of several sizes, made as large as the image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 8), conv(8, 8, dilation=2))
        self.stages = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 2, 1)) for size in (1, 2, 4)]
        )
        self.last = nn.Conv2d(14, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        size = x.shape[-2:]
        more = [F.interpolate(stage(x), size=size, mode="bilinear", align_corners=False) for stage in self.stages]
        return self.last(torch.cat([x, *more], 1))


class Features(nn.Module):
    """A feature pyramid with a head that all sizes share, as detectors of one stage have it."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleList([conv(3, 8, stride=2), conv(8, 16, stride=2), conv(16, 16, stride=2)])
        self.lateral = nn.ModuleList([nn.Conv2d(width, 8, 1) for width in (8, 16, 16)])
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, CLASSES, 1)
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for block in self.c:
            x = block(x)
            found.append(x)
        out: list[Tensor] = []
        top: Tensor | None = None
        for lateral, of_level in zip(reversed(self.lateral), reversed(found), strict=True):
            own = lateral(of_level)
            top = own if top is None else own + F.interpolate(top, size=own.shape[-2:])
            out.append(top)
        return [self.head(level) * scale for level, scale in zip(out, self.scales, strict=True)]


def of_levels(output: list[Tensor], target: Tensor) -> Tensor:
    return sum(F.cross_entropy(level.mean((2, 3)), target) for level in output)  # type: ignore[return-value]


class Hourglass(nn.Module):
    """Calls itself one size smaller, and looks at what came of each stack."""

    class Level(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.up, self.low = Plus(conv(8, 8)), Plus(conv(8, 8))
            self.inner = Hourglass.Level(depth - 1) if depth else Plus(conv(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) + F.interpolate(self.inner(self.low(F.max_pool2d(x, 2))), scale_factor=2)

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.stacks = nn.ModuleList([Hourglass.Level(1) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Conv2d(8, CLASSES, 1) for _ in range(2)])
        self.back = nn.Conv2d(CLASSES, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.stem(x), []
        for stack, head in zip(self.stacks, self.heads, strict=True):
            y = stack(x)
            found.append(head(y))
            x = x + y + self.back(found[-1])
        return torch.stack(found, 1)


def of_stacks(output: Tensor, target: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(one, target) for one in output.unbind(1)]).mean()


class Transformed(nn.Module):
    """A spatial transformer: turns the image before it looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6)
        )
        self.locate[-1].weight.data.mul_(0.1)
        self.locate[-1].bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.body = Pooled(conv(3, 8), 8)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return self.body(F.grid_sample(x, grid, align_corners=False))


class Capsules(nn.Module):
    """Routing by agreement, in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 5, 4)
        self.weight = nn.Parameter(0.3 * torch.randn(1, 18, CLASSES, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        own = self._squash(self.conv(x).flatten(1).view(x.size(0), -1, 4))
        votes = (self.weight @ own[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(*votes.shape[:3], 1, dtype=x.dtype, device=x.device)
        for _ in range(3):
            out = self._squash((logits.softmax(2) * votes).sum(1, keepdim=True))
            logits = logits + (votes * out).sum(-1, keepdim=True)
        return out.squeeze(1).norm(dim=-1)

    def _squash(self, x: Tensor) -> Tensor:
        size = (x * x).sum(-1, keepdim=True)
        return size / (1 + size) * x / (size.sqrt() + 1e-8)


def margin(output: Tensor, target: Tensor) -> Tensor:
    one = F.one_hot(target, CLASSES).to(output.dtype)
    return (one * F.relu(0.9 - output) ** 2 + 0.5 * (1 - one) * F.relu(output - 0.1) ** 2).sum(1).mean()


class Masked(nn.Conv2d):
    """PixelCNN's convolution, which does not see later pixels."""

    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mask = torch.ones_like(self.weight)
        high, wide = self.weight.shape[2:]
        mask[:, :, high // 2, wide // 2 + (kind == "B") :] = 0
        mask[:, :, high // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


def pixelcnn() -> nn.Module:
    first = Masked("A", 3, 8, 5, padding=2)
    return nn.Sequential(first, nn.ReLU(), Plus(Masked("B", 8, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 3, 1))


def super_resolution() -> nn.Module:
    body = [Plus(nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)]
    return nn.Sequential(
        nn.AvgPool2d(2), nn.Conv2d(3, 8, 3, padding=1), *body, nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)
    )


def generator() -> nn.Module:
    """DCGAN's two networks one behind the other, the second with spectral normalisation."""
    return nn.Sequential(
        *(nn.Unflatten(1, (WIDTH, 1, 1)), nn.ConvTranspose2d(WIDTH, 8, 4), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()),
        *(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        ),
    )


class StyleNorm(nn.Module):
    """Adaptive instance normalisation: one input sets how the other is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.one, self.two = mlp(3, 8, 16), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.const = nn.Parameter(torch.randn(1, 8, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.style(x.mean((2, 3))).chunk(2, 1)
        x = F.instance_norm(self.one(x) + self.const.expand(len(x), -1, -1, -1))
        return self.two(torch.addcmul(shift[..., None, None], x, 1 + scale[..., None, None]))


class Quantised(nn.Module):
    """VQ-VAE: the nearest of a table, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.codes = nn.Embedding(12, 4)
        self.decode = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 4)
        nearest = torch.cdist(flat, self.codes.weight).argmin(1)
        code = self.codes(nearest).view(z.size(0), z.size(2), z.size(3), 4).permute(0, 3, 1, 2)
        beside = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return {"x": self.decode(z + (code - z).detach()), "beside": beside}


def rebuilt(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["x"], target) + output["beside"]


class Variational(nn.Module):
    """A VAE, whose noise is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(WIDTH, 32, 8), mlp(4, 32, WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encode(x).chunk(2, dim=-1)
        return self.decode(mean + noise * torch.exp(0.5 * logvar)), mean, logvar


def with_noise(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, WIDTH)
    return x, torch.randn(rows, 4), x


def elbo(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    x, mean, logvar = output
    return F.mse_loss(x, target) - 0.05 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()


class Flow(nn.Module):
    """RealNVP: a list of couplings, and the log of their determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([mlp(WIDTH // 2, 16, WIDTH) for _ in range(4)])
        self.register_buffer("turned", torch.arange(WIDTH - 1, -1, -1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logdet = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = x.split(WIDTH // 2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            logdet += scale.sum(1)
            x = torch.cat([a, b * scale.exp() + shift], 1)[:, self.turned]
        return x, logdet


def likelihood(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    z, logdet = output
    return (0.5 * z.square().sum(1) - logdet).mean()


# Models for images without convolutions, or with few of them


def mixer() -> nn.Module:
    def block() -> nn.Module:
        tokens = Plus(nn.LayerNorm(16), Turned(mlp(16, 32, 16)))
        return nn.Sequential(tokens, Plus(nn.LayerNorm(16), mlp(16, 32, 16)))

    patches = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2))
    body = nn.Sequential(patches, Turned(nn.Sequential(block(), block(), nn.LayerNorm(16))))
    return Pooled(body, 16)


class Gated(nn.Module):
    """gMLP's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.gate_norm, self.gate = nn.LayerNorm(16), nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(u * (1 + self.gate(self.gate_norm(v))))


def patched(*blocks: nn.Module) -> nn.Module:
    """Blocks on 16 patches of 16 numbers."""
    return Pooled(nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), Turned(nn.Sequential(*blocks))), 16)


class Fourier(nn.Module):
    """FNet's mixing: the real part of two Fourier transforms."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class Affine(nn.Module):
    """ResMLP's, in place of a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class PoolMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1, count_include_pad=False).transpose(1, 2) - x


def convmixer() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            Plus(nn.Conv2d(16, 16, 3, groups=16, padding="same"), nn.GELU(), nn.BatchNorm2d(16)),
            *(nn.Conv2d(16, 16, 1), nn.GELU(), nn.BatchNorm2d(16)),
        )

    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.BatchNorm2d(16), block(), block()),
        *(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


class Attention(nn.Module):
    """Attention by hand, its q, k and v from one layer; what a subclass does differently is in `scores`."""

    def __init__(self, width: int = 16, heads: int = 4, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = self.scores(q, k)
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
        return self.out(x)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


def block(attention: nn.Module, width: int = 16) -> nn.Module:
    return nn.Sequential(Plus(nn.LayerNorm(width), attention), Plus(nn.LayerNorm(width), mlp(width, 2 * width, width)))


class Vit(nn.Module):
    """A class token, positions, and a second token with a head of its own if it is distilled."""

    def __init__(self, *, distilled: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.extra = nn.Parameter(torch.randn(1, 1 + distilled, 16))
        self.places = nn.Parameter(0.1 * torch.randn(1, 17 + distilled, 16))
        self.blocks = nn.ModuleList([block(Attention()) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.heads = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(1 + distilled)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.extra.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        for one in self.blocks:
            x = one(x)
        x = self.norm(x)
        return sum(head(x[:, place]) for place, head in enumerate(self.heads)) / len(self.heads)  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """Swin's blocks: windows, shifted by a roll in each second one, with biases by relative places."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, 2)
        self.blocks = nn.ModuleList([block(Window()) for _ in range(2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for place, one in enumerate(self.blocks):
            x = torch.roll(x, (-2 * place, -2 * place), (1, 2))
            rows, high, wide, width = x.shape
            cut = x.view(rows, high // 4, 4, wide // 4, 4, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, width)
            cut = one(cut)
            x = (
                cut.view(rows, high // 4, wide // 4, 4, 4, width)
                .permute(0, 1, 3, 2, 4, 5)
                .reshape(rows, high, wide, width)
            )
            x = torch.roll(x, (2 * place, 2 * place), (1, 2))
        return self.head(x.mean((1, 2)))


class Window(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(49, self.heads))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None]).permute(1, 2, 0) + 3
        self.register_buffer("index", apart[..., 0] * 7 + apart[..., 1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        bias = self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1)
        return super().scores(q, k) + bias.unsqueeze(0)


class Perceiver(nn.Module):
    """Learned queries look at all pixels, the same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, 16))
        self.cross = nn.MultiheadAttention(16, 2, kdim=3, vdim=3, batch_first=True)
        self.inner, self.head = block(Attention()), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        z = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
        for _ in range(2):
            z = z + self.cross(z, pixels, pixels, need_weights=False)[0]
            z = self.inner(z)
        return self.head(z.mean(1))


# Models for sequences


class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv2d(1, 6, (size, 8)) for size in (2, 3, 4)])
        self.fc = nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x).unsqueeze(1)
        found = [F.relu(one(x)).squeeze(3) for one in self.convs]
        return self.fc(torch.cat([F.max_pool1d(one, one.size(2)).squeeze(2) for one in found], 1))


class FastText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
        return self.fc(self.bag(x.flatten(), offsets) / x.shape[1])


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


def temporal() -> nn.Module:
    """A TCN: dilated causal convolutions with normalised weights."""

    def level(own: int, dilation: int) -> nn.Module:
        layer = parametrizations.weight_norm(nn.Conv1d(own, 8, 3, padding=2 * dilation, dilation=dilation))
        return nn.Sequential(layer, Chomp(2 * dilation), nn.ReLU())

    return Pooled(nn.Sequential(level(1, 1), Plus(level(8, 2)), Plus(level(8, 4))), 8)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**place), nn.Conv1d(8, 16, 1)]) for place in range(3)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips: Tensor | float = 0.0
        for place, (gated, out) in enumerate(self.layers):
            tanh, sigmoid = gated(F.pad(x, (2**place, 0))).chunk(2, dim=1)
            residual, skip = out(tanh.tanh() * sigmoid.sigmoid()).split([8, 8], dim=1)
            x, skips = x + residual, skips + skip
        return self.fc(self.last(skips))


class Seq2Seq(nn.Module):
    """A decoder that looks back at the encoder in each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.bridge, self.attend = nn.Linear(16, 8), nn.Linear(24, 8)
        self.score, self.cell, self.out = nn.Linear(8, 1, bias=False), nn.GRUCell(24, 8), nn.Linear(32, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, hidden = self.encoder(self.table(source))
        state = torch.tanh(self.bridge(torch.cat((hidden[-2], hidden[-1]), dim=1)))
        found = []
        for step in range(target.size(1)):
            own = self.table(target[:, step])
            energy = torch.tanh(self.attend(torch.cat((state.unsqueeze(1).repeat(1, memory.size(1), 1), memory), 2)))
            context = torch.bmm(self.score(energy).softmax(1).transpose(1, 2), memory).squeeze(1)
            state = self.cell(torch.cat((own, context), 1), state)
            found.append(self.out(torch.cat((state, context, own), 1)))
        return torch.stack(found, dim=1)


class Pointer(nn.Module):
    """Gives places of its input, of which each is taken once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder, self.cell = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True), nn.LSTMCell(8, 8)
        self.w1, self.w2, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        own = self.table(x)
        memory, (h, c) = self.encoder(own)
        h, c, inputs = h[0], c[0], own.mean(1)
        taken = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        found = []
        for _ in range(3):
            h, c = self.cell(inputs, (h, c))
            scores = self.v(torch.tanh(self.w1(memory) + self.w2(h)[:, None])).squeeze(2).masked_fill(taken, -20.0)
            found.append(scores.log_softmax(1))
            chosen = scores.argmax(1)
            taken = taken.scatter(1, chosen[:, None], True)
            inputs = own[torch.arange(len(x)), chosen]
        return torch.stack(found).mean(0)


class Memory(nn.Module):
    """An end-to-end memory network, of three hops with tables that are shared between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(WORDS, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        u = self.tables[0](x[:, -1])
        for first, second in zip(self.tables, list(self.tables)[1:], strict=False):
            p = torch.einsum("nld,nd->nl", first(x), u).softmax(-1)
            u = u + torch.einsum("nl,nld->nd", p, second(x))
        return u @ self.tables[-1].weight[:CLASSES].t()


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gates = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            g = torch.sigmoid(gate(x) - 1)
            x = g * F.relu(layer(x)) + (1.0 - g) * x
        return self.last(x)


class Simple(nn.Module):
    """A simple recurrent unit: all products at once, and the recurrence by element."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w, self.fc = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        value, forget, reset = self.w(self.table(x)).chunk(3, -1)
        forget, reset = forget.sigmoid(), reset.sigmoid()
        c = torch.zeros_like(value[:, 0])
        found = []
        for step in range(x.size(1)):
            c = forget[:, step] * c + (1 - forget[:, step]) * value[:, step]
            found.append(reset[:, step] * torch.tanh(c))
        return self.fc(torch.stack(found, 1).mean(1))


class Language(nn.Module):
    """A causal language model of these blocks; the head is tied to the table."""

    def __init__(
        self, make: Callable[[], nn.Module], *, positions: str = "learned", count: int = 2, shared: bool = False
    ) -> None:
        super().__init__()
        self.tok, self.positions = nn.Embedding(WORDS, 16), positions
        nn.init.normal_(self.tok.weight, std=0.3)
        if positions == "learned":
            self.pos = nn.Parameter(0.1 * torch.randn(1, LENGTH, 16))
        elif positions == "sinusoidal":
            place = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(0, 16, 2) * (-math.log(10000.0) / 16))
            self.register_buffer("pe", torch.stack([place.sin(), place.cos()], -1).flatten(1)[None], persistent=False)
        self.blocks = nn.ModuleList([make()] * count if shared else [make() for _ in range(count)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        x = self.tok(x) * math.sqrt(16)
        if self.positions == "learned":
            x = x + self.pos[:, :length]
        elif self.positions == "sinusoidal":
            x = x + self.pe[:, :length].to(x.dtype)
        for one in self.blocks:
            x = one(x)
        return self.head(self.norm(x))


class Rotary(Attention):
    """Llama's attention: rotated by place, fewer keys than queries."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.q, self.kv, self.out = (
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 8, bias=False),
            nn.Linear(16, 16, bias=False),
        )
        freqs = torch.outer(torch.arange(LENGTH).float(), 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Parameters of float64 need complex numbers of the same precision.
        kept = self.cis
        super()._apply(fn, recurse)
        self.cis = kept.to(torch.complex128 if self.q.weight.dtype == torch.float64 else torch.complex64)
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self._turned(self.q(x).view(rows, length, 4, 4))
        k, v = self.kv(x).view(rows, length, 2, 4).unbind(2)
        k = self._turned(k.unsqueeze(2)).expand(-1, -1, 4, -1)
        v = v.unsqueeze(2).expand(-1, -1, 4, -1)
        x = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        return self.out(x.transpose(1, 2).contiguous().view(rows, length, -1))

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.cis[: x.size(1)].unsqueeze(1)).flatten(3)


class Rms(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*widths, bias=False) for widths in ((16, 32), (32, 16), (16, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def llama_block() -> nn.Module:
    return nn.Sequential(Plus(Rms(), Rotary()), Plus(Rms(), SwiGlu()))


class Linearly(Attention):
    """ALiBi: a bias that grows with the distance, by a slope of each head."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** -(8 / self.heads * (head + 1)) for head in range(self.heads)], dtype=q.dtype)
        place = torch.arange(q.size(-2))
        return super().scores(q, k) + slopes[:, None, None] * (place[None] - place[:, None]).clamp(max=0)


class Bucketed(Attention):
    """T5: biases by buckets of distances."""

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.bias = nn.Embedding(4, self.heads)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.size(-2), device=q.device)
        apart = (place[:, None] - place[None]).clamp(min=0)
        bucket = torch.where(apart < 2, apart, (2 + (apart.double() / 2).log2().long().clamp(0, 1)))
        return q @ k.transpose(-2, -1) + self.bias(bucket).permute(2, 0, 1).unsqueeze(0)


class Parallel(nn.Module):
    """GPT-J and PaLM: attention beside the other layer, of the same normalised numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(16), Attention(causal=True), mlp(16, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class Latent(nn.Module):
    """Multi-head latent attention: keys and values come out of few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.norm = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False), Rms(4)
        self.up, self.out = nn.Linear(4, 32, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.up(self.norm(self.down(x))).unflatten(-1, (4, 8)).transpose(1, 2).split(4, -1)
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Kernel(Attention):
    """Linear attention: sums that run along the sequence in place of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)) for one in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("nlhd,nlhe->nlhde", k, v).cumsum(1)
        found = torch.einsum("nlhd,nlhde->nlhe", q, sums) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.out(found.flatten(2))


class Low(Attention):
    """Linformer: keys and values of fewer places, by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fewer = nn.Parameter(0.3 * torch.randn(LENGTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (torch.einsum("nld,lk->nkd", one, self.fewer) for one in (k, v))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        return self.out((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Retention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        gamma = 1 - 2.0 ** (-5 - torch.arange(self.heads, dtype=x.dtype, device=x.device))
        place = torch.arange(x.size(1), device=x.device)
        apart = place[:, None] - place[None]
        decay = (gamma[:, None, None] ** apart.clamp(min=0)).masked_fill(apart < 0, 0.0)
        found = (q @ k.transpose(-1, -2) * decay) @ v
        return self.out(F.group_norm(found.transpose(1, 2).flatten(0, 1).flatten(1), self.heads).view_as(x))


class Receptance(nn.Module):
    """RWKV: a sum that decays, with what came before mixed into each place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay, self.first = (nn.Parameter(torch.rand(16)) for _ in range(3))
        self.k, self.v, self.r, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.mix + self.shift(x) * (1 - self.mix)
        k, v, r = self.k(x), self.v(x), self.r(x).sigmoid()
        top, below, found = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for step in range(x.size(1)):
            own = torch.exp(self.first + k[:, step])
            found.append((top + own * v[:, step]) / (below + own))
            top = torch.exp(-self.decay) * top + torch.exp(k[:, step]) * v[:, step]
            below = torch.exp(-self.decay) * below + torch.exp(k[:, step])
        return self.o(r * torch.stack(found, 1))


class StateSpace(nn.Module):
    """S4D: a convolution whose kernel is made of complex exponentials, by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.log_real, self.imaginary = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.rand(16, 4) * 3)
        self.c, self.d = nn.Parameter(torch.randn(16, 4, 2)), nn.Parameter(torch.ones(16))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        a = torch.complex(-self.log_real.exp(), self.imaginary) * 0.1
        powers = torch.exp(a.unsqueeze(-1) * torch.arange(length, device=x.device))
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c) * (a.exp() - 1) / a, powers).real
        y = torch.fft.irfft(
            torch.fft.rfft(x, 2 * length, dim=1) * torch.fft.rfft(kernel.t(), 2 * length, dim=0), 2 * length, dim=1
        )
        return self.out(F.gelu(y[:, :length] + x * self.d))


class Selective(nn.Module):
    """Mamba: a scan whose steps follow from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv = nn.Linear(16, 32, bias=False), nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.x, self.dt, self.out = nn.Linear(16, 10, bias=False), nn.Linear(2, 16), nn.Linear(16, 16, bias=False)
        self.a_log, self.d = nn.Parameter(torch.arange(1.0, 5).repeat(16, 1).log()), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        x, gate = self.inner(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        dt, b, c = self.x(x).split([2, 4, 4], dim=-1)
        dt = F.softplus(self.dt(dt))
        da = torch.exp(torch.einsum("nld,dk->nldk", dt, -self.a_log.exp()))
        dbx = torch.einsum("nld,nlk,nld->nldk", dt, b, x)
        h, found = torch.zeros_like(dbx[:, 0]), []
        for step in range(length):
            h = da[:, step] * h + dbx[:, step]
            found.append(torch.einsum("ndk,nk->nd", h, c[:, step]))
        return self.out((torch.stack(found, 1) + x * self.d) * F.silu(gate))


class Reversible(nn.Module):
    """RevNet: the backward pass computes again what the forward pass has not kept."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, f: Any, g: Any, *params: Tensor) -> Tensor:
            ctx.f, ctx.g, ctx.params = f, g, params
            with torch.no_grad():
                a, b = x.chunk(2, -1)
                a = a + f(b)
                out = torch.cat([a, b + g(a)], -1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (out,) = ctx.saved_tensors
            a, b = out.chunk(2, -1)
            with torch.no_grad():
                b = b - ctx.g(a)
                a = a - ctx.f(b)
            x = torch.cat([a, b], -1).detach().requires_grad_()
            with torch.enable_grad():
                a, b = x.chunk(2, -1)
                a = a + ctx.f(b)
                y = torch.cat([a, b + ctx.g(a)], -1)
            first, *others = torch.autograd.grad(y, (x, *ctx.params), grad)
            return first, None, None, *others

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = mlp(8, 16, 8), mlp(8, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.Step.apply(x, self.f, self.g, *self.f.parameters(), *self.g.parameters())  # type: ignore[no-any-return]


class Switch(nn.Module):
    """A mixture of experts with one for each position; the rows of an expert are looked up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlps = nn.Linear(16, 3), nn.ModuleList([mlp(16, 32, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, one in enumerate(self.mlps):
            places = torch.nonzero(chosen == number).squeeze(1)
            out = out.index_add(0, places, weight[places, None] * one(flat[places]))
        return out.view_as(x)


class Compressed(nn.Module):
    """ALBERT and a universal transformer: a small table, one block that is called four times, a signal for the time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.block = nn.Embedding(WORDS, 4), nn.Linear(4, 16), block(Attention())
        self.time, self.fc = nn.Embedding(4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.table(x))
        for step in range(4):
            x = self.block(x + self.time.weight[step])
        return self.fc(x[:, 0])


class TwoTasks(nn.Module):
    """BERT: masked words, and one class for each row, out of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.typ = nn.Embedding(WORDS, 16), nn.Embedding(2, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.words = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.bias, self.pooler = (
            nn.Parameter(torch.zeros(WORDS)),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kind = (torch.arange(x.size(1)) >= 3).long().expand_as(x)
        y = self.encoder(self.tok(x) + self.typ(kind), src_key_padding_mask=x.eq(0))
        return {"words": F.linear(self.words(y), self.tok.weight, self.bias), "class": self.pooler(y[:, 0])}


def of_both(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["class"], target) + output["words"].logsumexp(-1).mean()


class Conformer(nn.Module):
    """Half a step of each layer, convolutions between, and subsampled places."""

    def __init__(self) -> None:
        super().__init__()
        self.sub = nn.Conv1d(8, 16, 3, 2, 1)
        self.one, self.two = (
            nn.Sequential(nn.LayerNorm(16), mlp(16, 32, 16)),
            nn.Sequential(nn.LayerNorm(16), mlp(16, 32, 16)),
        )
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, CLASSES)
        self.conv = nn.Sequential(
            nn.Conv1d(16, 32, 1), nn.GLU(1), nn.Conv1d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm1d(16), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.sub(x.mT).mT
        x = x + 0.5 * self.one(x)
        x = x + self.attention(x, x, x, need_weights=True)[0]
        x = x + self.conv(x.mT).mT
        x = x + 0.5 * self.two(x)
        return self.out(self.norm(x))


class Deep(nn.Module):
    """Deep Speech: convolutions, a recurrent layer both ways, whose outputs are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, (3, 3), (2, 1), 1), nn.BatchNorm2d(4), nn.Hardtanh(0, 20))
        self.rnn, self.fc = nn.RNN(16, 16, batch_first=True, bidirectional=True), nn.Linear(16, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.unsqueeze(1).transpose(2, 3)).flatten(1, 2).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.fc(x.view(x.size(0), x.size(1), 2, -1).sum(2))


class Speakers(nn.Module):
    """An x-vector: mean and deviation along the time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 8, 5), nn.ReLU(), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, dilation=2), nn.ReLU()
        )
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.body(x), dim=2)
        return self.fc(torch.cat((mean, std), 1))


# Models for forecasts


class Decomposed(nn.Module):
    """DLinear: a moving mean and the rest, each by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.season = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        front, end = x[:, :1].repeat(1, 2, 1), x[:, -1:].repeat(1, 2, 1)
        trend = F.avg_pool1d(torch.cat([front, x, end], 1).permute(0, 2, 1), 5, 1)
        return (self.trend(trend) + self.season(x.permute(0, 2, 1) - trend)).permute(0, 2, 1)


class Stacks(nn.Module):
    """N-BEATS: each block subtracts what it explains, and the forecasts are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict({"fc": mlp(72, 16, 16, last=True), "back": nn.Linear(16, 72), "fore": nn.Linear(16, 24)})
                for _ in range(3)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        left, out = x.flatten(1), torch.zeros(len(x), 24, dtype=x.dtype)
        for one in self.blocks:
            h = one["fc"](left)
            left = left - one["back"](h)
            out = out + one["fore"](h)
        return out.unflatten(1, (8, 3))


class Patches(nn.Module):
    """PatchTST: each channel separately, in overlapping patches, normalised by its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.body, self.head = nn.Linear(8, 16), block(Attention()), nn.Linear(80, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True, unbiased=False) + 1e-5
        x = ((x - mean) / std).transpose(1, 2).unfold(-1, 8, 4)
        x = self.body(self.patch(x).flatten(0, 1)).flatten(1)
        return self.head(x).view(-1, 3, 8).transpose(1, 2) * std + mean


class Periods(nn.Module):
    """TimesNet, in short: folded by the strongest frequency of the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        strength = torch.fft.rfft(x, dim=1).abs().mean(-1)
        weights = strength[:, [2, 3, 4]].softmax(1)
        found = []
        for period in (12, 8, 6):
            folded = x.reshape(len(x), -1, period, 3).permute(0, 3, 1, 2)
            found.append(self.conv(folded).permute(0, 2, 3, 1).reshape(len(x), 24, 3))
        y = (torch.stack(found, -1) * weights[:, None, None]).sum(-1) + x
        return self.fc(y.transpose(1, 2)).transpose(1, 2)


# Models for tables


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(7, 4) for _ in range(3)])
        self.wide, self.deep = nn.Linear(25, 1), mlp(16, 16, 8, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        one = F.one_hot(categories, 7).flatten(1).to(numbers)
        deep = torch.cat([table(categories[:, place]) for place, table in enumerate(self.tables)] + [numbers], dim=1)
        return self.wide(torch.cat((one, numbers), 1)) + self.deep(deep)


class Factored(nn.Module):
    """DeepFM: pairs by the square of a sum less the sum of squares; one table with offsets for all fields."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.deep = nn.Embedding(21, 1), nn.Embedding(21, 4), mlp(12, 16, 1)
        self.number, self.bias = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))
        self.register_buffer("offsets", torch.tensor([0, 7, 14]))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        places = categories + self.offsets
        v = self.table(places)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1, keepdim=True)
        return self.bias + self.first(places).sum(1) + self.number(numbers) + pairs + self.deep(v.flatten(1))


class Crossed(nn.Module):
    """DCN, of both versions: crosses by vectors and by matrices beside a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.deep, self.out = nn.Embedding(7, 4), mlp(16, 16, 8), nn.Linear(24, 1)
        self.vectors = nn.ParameterList([nn.Parameter(0.3 * torch.randn(16, 1)) for _ in range(2)])
        self.matrix = nn.Linear(16, 16)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x0 = x = torch.cat([self.table(categories).flatten(1), numbers], 1)
        for vector in self.vectors:
            x = x0 * (x @ vector) + x
        x = x0 * self.matrix(x) + x
        return self.out(torch.cat([x, self.deep(x0)], 1))


class Dlrm(nn.Module):
    """Products of all pairs, below the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.tables = mlp(4, 8, 4), nn.ModuleList([nn.EmbeddingBag(7, 4, mode="sum") for _ in range(3)])
        self.top = mlp(10, 16, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        every = torch.stack([x] + [table(categories[:, [place]]) for place, table in enumerate(self.tables)], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, row, column]], 1))


class Rows(nn.Module):
    """TabTransformer: attention between a row's categories."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.field = nn.Embedding(21, 16), nn.Parameter(torch.randn(3, 16))
        self.body, self.norm, self.out = block(Attention()), nn.LayerNorm(4), mlp(52, 16, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.body(self.table(categories + torch.tensor([0, 7, 14])) + self.field)
        return self.out(torch.cat((x.flatten(1), self.norm(numbers)), -1))


class Collaborative(nn.Module):
    """NCF: a product of tables beside a network of others."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.user2, self.item2 = (nn.Embedding(7, 4) for _ in range(4))
        self.deep, self.out = mlp(8, 8, 4, last=True), nn.Linear(8, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        user, item = categories[:, 0], categories[:, 1]
        deep = self.deep(torch.cat([self.user2(user), self.item2(item)], -1))
        return self.out(torch.cat([self.user(user) * self.item(item), deep], -1))


# Models for graphs and for point clouds


class Graph(nn.Module):
    """Messages between neighbours, in the requested way, and the mean of the nodes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.own = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.attend = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(2)])
        self.eps, self.fc = nn.Parameter(torch.zeros(2)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        for place, (layer, own, attend) in enumerate(zip(self.layers, self.own, self.attend, strict=True)):
            if self.kind == "gcn":
                every = near + torch.eye(7, dtype=near.dtype)
                degree = every.sum(-1).rsqrt()
                x = torch.relu(layer(degree[..., None] * every @ (degree[..., None] * x)))
            elif self.kind == "gat":
                h = layer(x)
                scores = F.leaky_relu((h @ attend[:8])[:, :, None] + (h @ attend[8:])[:, None], 0.2)
                scores = scores.masked_fill(near + torch.eye(7, dtype=near.dtype) == 0, -1e9)
                x = F.elu(scores.softmax(-1) @ h)
            elif self.kind == "gin":
                x = torch.relu(layer((1 + self.eps[place]) * x + near @ x))
            else:
                mean = near @ x / near.sum(-1, keepdim=True).clamp(min=1)
                x = F.normalize(torch.relu(layer(mean) + own(x)), dim=-1)
        return self.fc(x.mean(1))


class Distances(nn.Module):
    """EGNN: messages by distances, by which the points move too."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node, self.move = mlp(17, 16, 8, last=True), mlp(16, 16, 8), mlp(8, 8, 1)
        self.first, self.fc = nn.Parameter(torch.randn(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first.expand(len(x), x.size(1), -1)
        for _ in range(2):
            apart = x[:, :, None] - x[:, None]
            size = apart.pow(2).sum(-1, keepdim=True)
            pair = torch.cat([h[:, :, None].expand(-1, -1, 10, -1), h[:, None].expand(-1, 10, -1, -1), size], -1)
            m = self.edge(pair)
            x = x + (apart * self.move(m)).mean(2)
            h = h + self.node(torch.cat([h, m.sum(2)], -1))
        return self.fc(h.sum(1) / 10)


class PointNet(nn.Module):
    """Turns the points by a matrix of its own making, and takes the largest of each number."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.turn_fc = nn.Conv1d(3, 8, 1), nn.Linear(8, 9)
        self.conv = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1))
        self.fc = mlp(16, 16, CLASSES)
        self.register_buffer("same", torch.eye(3).flatten())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(2, 1)
        turn = (self.turn_fc(self.turn(x).relu().amax(2)) + self.same).view(-1, 3, 3)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        return self.fc(torch.max(self.conv(x), 2, keepdim=True)[0].view(-1, 16)), turn


def straight(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    x, turn = output
    off = torch.eye(3, dtype=turn.dtype) - turn @ turn.transpose(1, 2)
    return F.cross_entropy(x, target) + 0.001 * off.norm(dim=(1, 2)).mean()


class Neighbours(nn.Module):
    """DGCNN: the nearest points of each, gathered by index."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = mlp(6, 16, 8), mlp(16, 16, 8), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self._gathered(x, self.one)
        x = self._gathered(x, self.two)
        return self.fc(torch.cat([x.amax(1), x.mean(1)], 1))

    def _gathered(self, x: Tensor, part: nn.Module) -> Tensor:
        places = torch.cdist(x, x).topk(4, dim=-1, largest=False).indices
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        around = x[rows, places]
        own = x.unsqueeze(2).expand_as(around)
        return part(torch.cat([own, around - own], -1)).amax(2)


class Sets(nn.Module):
    """A set transformer, with induced points and seeds that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.points, self.seed = (
            nn.Linear(3, 16),
            nn.Parameter(torch.randn(1, 4, 16)),
            nn.Parameter(torch.randn(1, 1, 16)),
        )
        self.one, self.two, self.pool = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h, _ = self.one(self.points.expand(len(x), -1, -1), x, x)
        x = x + self.two(x, h, h)[0]
        return self.fc(self.pool(self.seed.expand(len(x), -1, -1), x, x)[0].squeeze(1))


# Models of functions, and models that learn gradients


class Sine(nn.Module):
    """SIREN's layer."""

    def __init__(self, own: int, out: int, omega: float) -> None:
        super().__init__()
        self.linear, self.omega = nn.Linear(own, out), omega
        with torch.no_grad():
            self.linear.weight.uniform_(-1 / own, 1 / own)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


class Radiance(nn.Module):
    """NeRF: points along each ray, and colours that are summed with the density of the points before them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(27, 32, 32, last=True), mlp(59, 32, 32, last=True)
        self.sigma, self.colour = nn.Linear(32, 1), mlp(35, 16, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(1.0, 3.0, 8, dtype=origin.dtype)
        at = origin[:, None] + direction[:, None] * depth[:, None]
        code = torch.cat([at] + [f(2.0**k * at) for k in range(4) for f in (torch.sin, torch.cos)], -1)
        h = self.two(torch.cat([self.one(code), code], -1))
        rgb = self.colour(torch.cat([h, direction[:, None].expand_as(at)], -1)).sigmoid()
        alpha = 1 - torch.exp(-F.relu(self.sigma(h)).squeeze(-1) * (depth[1] - depth[0]))
        before = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * before)[..., None] * rgb).sum(1)


class Operator(nn.Module):
    """A Fourier neural operator, whose spectral weights are pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(3, 8), mlp(8, 16, 3)
        self.weights = nn.ParameterList([nn.Parameter(0.1 * torch.randn(8, 8, 5, 2)) for _ in range(2)])
        self.ws = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).permute(0, 2, 1)
        for weight, w in zip(self.weights, self.ws, strict=True):
            spectrum = torch.fft.rfft(x)
            out = torch.zeros(len(x), 8, x.size(-1) // 2 + 1, dtype=spectrum.dtype, device=x.device)
            out[:, :, :5] = torch.einsum("bix,iox->box", spectrum[:, :, :5], torch.view_as_complex(weight))
            x = F.gelu(torch.fft.irfft(out, n=x.size(-1)) + w(x))
        return self.project(x.permute(0, 2, 1))[:, -8:]


class DeepONet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.bias = mlp(24, 16, 8), mlp(1, 16, 8), nn.Parameter(torch.zeros(1))
        self.register_buffer("grid", torch.linspace(0, 1, 8)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bcp,gp->bgc", self.branch(x.transpose(1, 2)), self.trunk(self.grid)) + self.bias


class Informed(nn.Module):
    """A PINN: the gradient by its input is a part of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (grad,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u, grad


def informed(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    u, grad = output
    return F.mse_loss(u, target) + 0.1 * (grad[:, :1] - grad[:, 1:]).square().mean()


class Continuous(nn.Module):
    """A neural ODE, by four steps of Runge and Kutta, which call the same layers sixteen times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.f, self.last = nn.Linear(WIDTH, 8), mlp(9, 16, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, dt = self.first(x), 0.25
        for step in range(4):
            t = step * dt
            k1 = self._f(t, h)
            k2 = self._f(t + dt / 2, h + dt / 2 * k1)
            k3 = self._f(t + dt / 2, h + dt / 2 * k2)
            k4 = self._f(t + dt, h + dt * k3)
            h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.last(h)

    def _f(self, t: float, h: Tensor) -> Tensor:
        return self.f(torch.cat([h, torch.full_like(h[:, :1], t)], 1))


class Equilibrium(nn.Module):
    """A deep equilibrium: goes on until nothing changes, and has the gradient of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.out = nn.Linear(8, 8), nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.w.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        u = self.u(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(60):
                new = torch.tanh(self.w(z) + u)
                if (new - z).abs().max() < 1e-13:
                    break
                z = new
        return self.out(torch.tanh(self.w(z) + u))


class Splines(nn.Module):
    """A Kolmogorov-Arnold network of radial functions."""

    def __init__(self, own: int = WIDTH, out: int = CLASSES) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.spline, self.base = nn.Parameter(0.1 * torch.randn(out, own, 5)), nn.Linear(own, out)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - self.grid) ** 2))
        return self.base(F.silu(x)) + torch.tensordot(basis, self.spline, dims=([1, 2], [1, 2]))


class Hyper(nn.Module):
    """A network that makes the weights of another, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make, self.norm = mlp(8, 8, 4), nn.Linear(4, 8 * CLASSES + CLASSES), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.tensor_split(2, dim=1)
        made = self.make(self.code(a))
        weight, bias = made[:, :-CLASSES].view(-1, CLASSES, 8), made[:, -CLASSES:]
        return torch.baddbmm(bias.unsqueeze(2), weight, self.norm(b).unsqueeze(2)).squeeze(2)


class Mixture(nn.Module):
    """A mixture density network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2, 16, 16, last=True)
        self.pi, self.mean, self.std = nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return {"pi": self.pi(h), "mean": self.mean(h), "std": F.softplus(self.std(h)) + 0.1}


def density(output: dict[str, Tensor], target: Tensor) -> Tensor:
    parts = torch.distributions.Normal(output["mean"], output["std"], validate_args=False).log_prob(target)
    return -torch.logsumexp(output["pi"].log_softmax(-1) + parts, dim=-1).mean()


class Siamese(nn.Module):
    """Two crops of an image by the same body; the other one's projection has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = (
            nn.Sequential(conv(3, 8, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            mlp(8, 16, 8),
        )
        self.predict = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        z1, z2 = (self.project(self.body(part)) for part in (x[..., :12], x[..., 4:].flip(-1)))
        return torch.stack([F.cosine_similarity(self.predict(a), b.detach()) for a, b in ((z1, z2), (z2, z1))], 1)


class Denoise(nn.Module):
    """A small UNet that gets the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.one, self.two, self.up = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.ConvTranspose2d(8, 8, 4, 2, 1),
        )
        self.norm, self.last = nn.GroupNorm(4, 8), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None].to(x.dtype) * torch.exp(-math.log(100) * torch.arange(4, dtype=x.dtype) / 4)
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))[:, :, None, None]
        a = F.silu(self.one(x))
        b = F.silu(self.norm(self.two(a) + time))
        return self.last(torch.cat([a, self.up(b)], dim=1))


class Diffused(nn.Module):
    """DiT: normalisations that the time sets, and gates that begin with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(3, 16, 4, 4), nn.Embedding(100, 16)
        self.attention, self.mlp, self.sets = Attention(), mlp(16, 32, 16), nn.Sequential(nn.SiLU(), nn.Linear(16, 96))
        self.norm, self.out = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 48)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        a, b, c, d, e, f = self.sets(self.time(t)).unsqueeze(1).chunk(6, dim=2)
        x = x + c * self.attention(self.norm(x) * (1 + a) + b)
        x = x + f * self.mlp(self.norm(x) * (1 + d) + e)
        return torch.einsum("nhwpqc->nchpwq", self.out(x).reshape(-1, 4, 4, 4, 4, 3)).reshape(-1, 3, 16, 16)


class Duel(nn.Module):
    """A dueling network of distributions, as Rainbow has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 16), nn.ReLU())
        self.value, self.advantage = nn.Linear(16, 7), nn.Linear(16, 7 * CLASSES)
        self.register_buffer("support", torch.linspace(-1, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        value, advantage = self.value(h).view(-1, 1, 7), self.advantage(h).view(-1, CLASSES, 7)
        return ((value + advantage - advantage.mean(1, keepdim=True)).softmax(2) * self.support).sum(2)


class Instances(nn.Module):
    """Attention over the instances of a bag, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.v, self.u, self.w = mlp(3, 16, last=True), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = torch.softmax(self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h))), dim=1)
        return self.fc(torch.sum(a * h, dim=1))


def language(make: Callable[[], nn.Module], **options: Any) -> Kind:
    return Kind(make=lambda: Language(make, **options), batch=next_tokens, loss=token_loss)


def picture(make: Callable[[], nn.Module], loss: Any = F.cross_entropy, batch: Any = images) -> Kind:
    return Kind(make=make, batch=batch, loss=loss, optimizer=sgd)


#: The message for models that read parameters outside of a block's call: FSDP2 gathers them only during the call.
UNITS = r"FullyShard\(units=\[\]\) keeps all parameters together"
#: Model -> {layout that refuses it: part of the error message}.
REFUSED: dict[str, dict[str, str | None]] = {
    **{
        name: {"tensor": WHOLE}
        for name in (
            *("network-in-network", "unet++", "segnet", "pspnet", "feature-pyramid", "hourglass", "pixelcnn"),
            *("super-resolution", "vq-vae"),
        )
    },
    "capsules": {"tensor": WHOLE, "pipe": "can be cut into 1 parts at most"},
    # The model's forward reads the weight of the last table without calling the table.
    "memory-network": {"tensor": WHOLE, "shard": UNITS},
    # A gradient of a gradient passes through both layers of a pair that TensorParallel cuts.
    "pinn": {"shard": UNITS, "pipe": "`requires_grad_` begins a graph", "tensor": "is not the plain one.*'replicate'"},
    "deep-equilibrium": {"pipe": "asks for a tensor's values"},
}

PUBLISHED: dict[str, Kind] = {
    "lenet": picture(LeNet),
    "alexnet": picture(alexnet),
    "vgg": picture(lambda: vgg(normalised=False)),
    "vgg-batch-norm": picture(lambda: vgg(normalised=True)),
    "network-in-network": picture(network_in_network),
    "inception": picture(Inception, with_aux),
    "xception": picture(xception),
    "se-net": picture(lambda: Pooled(nn.Sequential(conv(3, 8, stride=2), Plus(conv(8, 8), Squeeze(8))), 8)),
    "cbam": picture(lambda: Pooled(nn.Sequential(conv(3, 8, stride=2), Plus(conv(8, 8), Attentive(8))), 8)),
    "ghostnet": picture(lambda: Pooled(nn.Sequential(Ghost(3, 8), nn.AvgPool2d(2), Ghost(8, 16)), 16)),
    "unet++": picture(Nested, batch=maps),
    "segnet": picture(SegNet, batch=maps),
    "pspnet": picture(Pyramid, batch=maps),
    "feature-pyramid": picture(Features, of_levels),
    "hourglass": picture(Hourglass, of_stacks, maps),
    "spatial-transformer": picture(Transformed),
    "capsules": picture(Capsules, margin),
    "pixelcnn": picture(pixelcnn, F.mse_loss, same),
    "super-resolution": picture(super_resolution, F.l1_loss, same),
    "dcgan": picture(generator, batch=vectors),
    "adain": picture(StyleNorm, F.mse_loss, same),
    "vq-vae": picture(Quantised, rebuilt, same),
    "vae": Kind(make=Variational, batch=with_noise, loss=elbo),
    "realnvp": Kind(make=Flow, batch=vectors, loss=likelihood),
    "mlp-mixer": picture(mixer),
    "gmlp": picture(lambda: patched(Gated(), Gated())),
    "fnet": picture(lambda: patched(Plus(Fourier()), nn.LayerNorm(16), Plus(mlp(16, 32, 16)))),
    "resmlp": picture(lambda: patched(Plus(Affine(), Turned(nn.Linear(16, 16))), Plus(Affine(), mlp(16, 64, 16)))),
    "poolformer": picture(
        lambda: patched(Plus(nn.LayerNorm(16), PoolMixer()), Plus(nn.LayerNorm(16), mlp(16, 32, 16)))
    ),
    "convmixer": picture(convmixer),
    "vit-by-hand": picture(Vit),
    "deit": picture(lambda: Vit(distilled=True)),
    "swin-by-hand": picture(Shifted),
    "perceiver": picture(Perceiver),
    "revnet": picture(lambda: patched(Reversible(), Reversible())),
    "text-cnn": Kind(make=TextCnn, batch=tokens),
    "fast-text": Kind(make=FastText, batch=tokens),
    "tcn": Kind(make=temporal, batch=waves),
    "wavenet": Kind(make=WaveNet, batch=waves),
    "seq2seq": Kind(make=Seq2Seq, batch=translated, loss=token_loss),
    "pointer-network": Kind(make=Pointer, batch=tokens),
    "memory-network": Kind(make=Memory, batch=tokens),
    "highway": Kind(make=Highway, batch=vectors),
    "sru": Kind(make=Simple, batch=tokens),
    "gpt": language(lambda: block(Attention(causal=True))),
    "gpt-sinusoidal": language(lambda: block(Attention(causal=True)), positions="sinusoidal"),
    "llama-by-hand": language(llama_block, positions="none"),
    "alibi": language(lambda: block(Linearly(causal=True)), positions="none"),
    "t5-biases": language(lambda: block(Bucketed()), positions="none"),
    "parallel-block": language(Parallel),
    "latent-attention": language(lambda: nn.Sequential(Plus(Rms(), Latent()), Plus(Rms(), SwiGlu()))),
    "linear-attention": language(lambda: block(Kernel())),
    "linformer": language(lambda: block(Low())),
    "retnet": language(lambda: block(Retention())),
    "rwkv": language(lambda: block(Receptance()), positions="none"),
    "s4d": language(lambda: Plus(nn.LayerNorm(16), StateSpace()), positions="none"),
    "mamba-by-hand": language(lambda: Plus(Rms(), Selective()), positions="none"),
    "reversible": language(Reversible),
    "switch": language(
        lambda: nn.Sequential(Plus(nn.LayerNorm(16), Attention(causal=True)), Plus(nn.LayerNorm(16), Switch()))
    ),
    "shared-blocks": language(lambda: block(Attention(causal=True)), count=3, shared=True),
    "albert-by-hand": Kind(make=Compressed, batch=tokens),
    "bert-two-tasks": Kind(make=TwoTasks, batch=tokens, loss=of_both),
    "conformer": Kind(make=Conformer, batch=spoken, loss=heard, optimizer=sgd),
    "deep-speech": Kind(make=Deep, batch=spoken, loss=heard, optimizer=sgd),
    "x-vector": Kind(make=Speakers, batch=waves, optimizer=sgd),
    "dlinear": Kind(make=Decomposed, batch=series, loss=F.mse_loss),
    "n-beats": Kind(make=Stacks, batch=series, loss=F.mse_loss),
    "patch-tst": Kind(make=Patches, batch=series, loss=F.mse_loss),
    "timesnet": Kind(make=Periods, batch=series, loss=F.mse_loss),
    "wide-and-deep": Kind(make=WideAndDeep, batch=table, loss=click),
    "deepfm": Kind(make=Factored, batch=table, loss=click),
    "dcn": Kind(make=Crossed, batch=table, loss=click),
    "dlrm": Kind(make=Dlrm, batch=table, loss=click),
    "tab-transformer": Kind(make=Rows, batch=table, loss=click),
    "ncf": Kind(make=Collaborative, batch=table, loss=click),
    "gcn": Kind(make=lambda: Graph("gcn"), batch=graphs),
    "gat": Kind(make=lambda: Graph("gat"), batch=graphs),
    "gin": Kind(make=lambda: Graph("gin"), batch=graphs),
    "graph-sage": Kind(make=lambda: Graph("sage"), batch=graphs),
    "egnn": Kind(make=Distances, batch=points),
    "pointnet": Kind(make=PointNet, batch=points, loss=straight, optimizer=sgd),
    "dgcnn": Kind(make=Neighbours, batch=points),
    "set-transformer": Kind(make=Sets, batch=points),
    "multiple-instances": Kind(make=Instances, batch=points),
    "siren": Kind(
        make=lambda: nn.Sequential(Sine(2, 16, 5.0), Sine(16, 16, 1.0), nn.Linear(16, 1)), batch=places, loss=F.mse_loss
    ),
    "nerf": Kind(make=Radiance, batch=rays, loss=F.mse_loss),
    "fno": Kind(make=Operator, batch=series, loss=F.mse_loss),
    "deeponet": Kind(make=DeepONet, batch=series, loss=F.mse_loss),
    "pinn": Kind(make=Informed, batch=places, loss=informed),
    "neural-ode": Kind(make=Continuous, batch=vectors),
    "deep-equilibrium": Kind(make=Equilibrium, batch=vectors),
    "kan": Kind(make=Splines, batch=vectors),
    "hyper-network": Kind(make=Hyper, batch=vectors),
    "mixture-density": Kind(make=Mixture, batch=places, loss=density),
    "simsiam": picture(Siamese, lambda output, target: -output.mean()),
    "ddpm": picture(Denoise, F.mse_loss, noised),
    "dit": picture(Diffused, F.mse_loss, noised),
    "rainbow": picture(Duel),
}
PUBLISHED |= {name: dataclasses.replace(PUBLISHED[name], refused=refused) for name, refused in REFUSED.items()}
