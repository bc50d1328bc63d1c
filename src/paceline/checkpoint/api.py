"""The parts of the checkpoint file format that other packages may import."""

from __future__ import annotations

from paceline.checkpoint.files import CheckpointFile, write_file
from paceline.checkpoint.values import DenseArray, decode_state, encode_state

__all__ = ["CheckpointFile", "DenseArray", "decode_state", "encode_state", "write_file"]
