"""A module's weights once for all model processes of a machine.

The first process writes them to a file, and every process maps that file in place of its own copy: the kernel keeps the pages
once. The mapping is private, so a process that writes to a weight has that page for itself, and no other sees it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from paceline.system.locks import locked

_ALIGNED = 64
#: Below this it is not worth a file.
_LEAST_BYTES = 1 << 20


def share(module: Any, folder: str, key: str) -> None:
    """Map the weights of a module on the CPU from `<folder>/<key>`, which is made where it is not there yet.

    Does nothing where the disk has no room for them.
    """
    import torch

    found: list[Any] = []
    seen: set[int] = set()
    for each in (*module.parameters(), *module.buffers()):
        # Tied weights are one tensor under two names.
        if each.data_ptr() not in seen and each.layout == torch.strided and each.is_contiguous() and each.numel():
            seen.add(each.data_ptr())
            found.append(each)
    offsets, size = [], 0
    for each in found:
        offsets.append(size)
        size += -(-each.numel() * each.element_size() // _ALIGNED) * _ALIGNED
    if size < _LEAST_BYTES:
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, key)
    with locked(Path(f"{path}.lock")):
        if not os.path.exists(path):
            if shutil.disk_usage(folder).free < 2 * size:
                return
            with open(f"{path}.part", "wb") as file:
                for each, offset in zip(found, offsets, strict=True):
                    file.seek(offset)
                    file.write(each.detach().reshape(-1).view(torch.uint8).numpy().data)
                file.truncate(size)
            os.replace(f"{path}.part", path)
    if os.path.getsize(path) != size:
        return
    mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for each, offset in zip(found, offsets, strict=True):
        end = offset + each.numel() * each.element_size()
        each.data = mapped[offset:end].view(each.dtype).view(each.shape)
