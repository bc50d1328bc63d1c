"""Write the data of the example: the source of Python's library as characters, in shards, into a datastore.

python examples/many_nodes/prepare.py --mib 64
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--store", help="name of a datastore; the workspace's default one if left out")
parser.add_argument(
    "--mib", type=int, default=64, help="characters in all, in MiB; the text is repeated as often as needed"
)
parser.add_argument(
    "--shards", type=int, default=16, help="files: a few for each node or more, so that they are fetched side by side"
)
args = parser.parse_args()

ws = pl.Workspace.from_config()
store = pl.Datastore(ws, args.store) if args.store else ws.get_default_datastore()
library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(path.read_bytes() for path in library), np.uint8)
size = args.mib * 2**20 // args.shards
with tempfile.TemporaryDirectory() as folder:
    for number in range(args.shards):
        # Each shard begins elsewhere in the text, so that no two files are the same.
        np.save(Path(folder) / f"shard_{number:04}.npy", np.resize(np.roll(text, -number * size), size))
    store.upload(folder, "characters", overwrite=True)
data = pl.Dataset.File.from_files((store, "characters/*.npy")).register(ws, "characters", create_new_version=True)
print(f"characters:{data.version}, {args.shards} files of {size / 2**20:.1f} MiB in {store.name}")
