"""The parts of the checkpoint file format that other packages may import."""

from __future__ import annotations

from paceline.checkpoint.background import END_S, SAVE_S, BackgroundWrite
from paceline.checkpoint.files import CheckpointFile, header_of, unreadable, write_file, write_image
from paceline.checkpoint.image import Camera
from paceline.checkpoint.neighbour import write_kept
from paceline.checkpoint.values import DenseArray, decode_state, encode_state, is_storable

__all__ = [
    "END_S",
    "SAVE_S",
    "BackgroundWrite",
    "Camera",
    "CheckpointFile",
    "DenseArray",
    "decode_state",
    "encode_state",
    "header_of",
    "is_storable",
    "unreadable",
    "write_file",
    "write_image",
    "write_kept",
]
