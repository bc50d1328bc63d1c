"""Models: files that a run made, kept under a name and a number, with where they come from.

    <workspace>/models/<name>/<version>/model.json     what it is (`record`); there is no version without it
    <workspace>/models/<name>/<version>/files/...       its files, as they were registered
    <workspace>/models/<name>/aliases.jsonl             each change of an alias, with who and when
    <workspace>/models/<name>/.last                     the highest version that ever was
    <workspace>/models/.blobs/<size>/<sha256>           each content once; a version's files are further names of it
    <workspace>/models/.parts/<token>/                  registrations that go on, or were killed

Nothing here loads a model: a file is read as bytes, and a pickle never as one.
"""

from paceline.models.registry import resolve

__all__ = ["resolve"]
