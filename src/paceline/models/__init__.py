"""Models: registered, versioned copies of files that a run has made, with their lineage.

    <workspace>/models/<name>/<version>/model.json     the record (`record`), which makes the version visible
    <workspace>/models/<name>/<version>/files/...       the registered files
    <workspace>/models/<name>/aliases.jsonl             each change of an alias, with time and user
    <workspace>/models/<name>/.last                     the highest version ever used
    <workspace>/models/.blobs/<size>/<sha256>           each content once; files of versions are hard links to it
    <workspace>/models/.parts/<token>/                  unfinished registrations

This package never loads a model: it reads files as bytes, and never unpickles a pickle.
"""

from paceline.models.registry import resolve

__all__ = ["resolve"]
