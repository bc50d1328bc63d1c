"""Layouts of public training repositories, rebuilt in a few lines each: where their scripts lie, read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The first line of each script prints its working directory, its import path and its arguments.
_SEEN = "import os, sys, json, glob, subprocess, shutil\nprint(os.getcwd(), sys.path[0], sys.argv[1:])\n"


def script(text: str) -> str:
    return _SEEN + text


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A project, and the command of its README.

    files: path -> text, relative to the project; "../" is beside it. A text that begins with "-> " is the target of a link.
    command: the words behind `python` (or the whole command of a program). cwd: its working directory, relative to the project.
    is_git: whether it is a repository. tracked: those of `files` that git tracks although .gitignore names them.
    """

    command: tuple[str, ...]
    files: Mapping[str, str]
    cwd: str = "."
    is_git: bool = True
    is_program: bool = False
    tracked: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


_READ = "print(open('data/x.txt').read())\n"
_IGNORED = {".gitignore": "data/\n*.ckpt\nout/\nlightning_logs/\n", "data/x.txt": "rows"}

LAYOUTS: dict[str, Layout] = {
    "script with its data beside it": Layout(
        command=("train.py",), files={"train.py": script(_READ), "data/x.txt": "rows"}
    ),
    "data that .gitignore names": Layout(
        command=("train.py", "--lr", "0.1"), files={**_IGNORED, "train.py": script(_READ)}
    ),
    "no repository": Layout(
        command=("train.py",), files={"train.py": script(_READ), "data/x.txt": "rows"}, is_git=False
    ),
    "script in a folder, no repository": Layout(
        command=("src/train.py",), files={"src/train.py": script(_READ), "data/x.txt": "rows"}, is_git=False
    ),
    "src and configs": Layout(
        command=("src/train.py",),
        files={
            "src/train.py": script("import model\nprint(open('configs/a.yaml').read(), model.N)"),
            "src/model.py": "N = 3",
            "configs/a.yaml": "lr: 1",
        },
    ),
    "from the script's folder": Layout(
        command=("train.py",),
        cwd="src",
        files={"src/train.py": script("print(open('../configs/a.yaml').read())"), "configs/a.yaml": "lr: 1"},
    ),
    "by the file's own place": Layout(
        command=("examples/basics/train.py",),
        files={
            **_IGNORED,
            "examples/basics/train.py": script(
                "from pathlib import Path\nprint((Path(__file__).resolve().parents[2] / 'data' / 'x.txt').read_text())"
            ),
        },
    ),
    "data sets above the project": Layout(
        command=("train.py",),
        files={"train.py": script("print(sorted(os.listdir('../datasets/tiny')))"), "../datasets/tiny/a.txt": "a"},
    ),
    "data above, from a folder": Layout(
        command=("main.py",),
        cwd="mnist",
        files={"mnist/main.py": script("print(open('../data/x.txt').read())"), **_IGNORED},
    ),
    "package by PYTHONPATH": Layout(
        command=("projects/adder.py",),
        env={"PYTHONPATH": "."},
        files={
            "projects/adder.py": script("import lib.model\nprint(lib.model.N)"),
            "lib/__init__.py": "",
            "lib/model.py": "N = 4",
        },
    ),
    "package above, by PYTHONPATH": Layout(
        command=("train.py",),
        cwd="lib",
        env={"PYTHONPATH": ".."},
        files={
            "lib/train.py": script("from lib.model import N\nprint(N)"),
            "lib/__init__.py": "",
            "lib/model.py": "N = 4",
        },
    ),
    "module of a package": Layout(
        command=("-m", "pkg.train", "--x", "1"),
        files={
            **_IGNORED,
            "pkg/__init__.py": "",
            "pkg/train.py": script("from . import part\nprint(part.N)\n" + _READ),
            "pkg/part.py": "N = 5",
        },
    ),
    "module, from a folder": Layout(
        command=("-m", "pkg.train"),
        cwd="code",
        files={
            "code/pkg/__init__.py": "",
            "code/pkg/train.py": script("print(open('../conf.txt').read())"),
            "conf.txt": "c",
        },
    ),
    "changes into its outputs": Layout(
        command=("train.py",),
        files={
            **_IGNORED,
            "train.py": script(
                "os.makedirs('outputs/2026-01-01/12-00-00')\nos.chdir('outputs/2026-01-01/12-00-00')\n"
                "print(open('../../../data/x.txt').read())\nopen('train.log', 'w').write('log')"
            ),
        },
    ),
    "links among its results": Layout(
        command=("train.py",),
        files={
            "train.py": script(
                "os.makedirs('outputs/a')\nopen('last.txt', 'w').write('l')\n"
                "os.symlink('../../last.txt', 'outputs/a/best')\nos.symlink('best', 'outputs/a/newest')"
            ),
        },
    ),
    "results in out, settings by exec": Layout(
        command=("train.py", "config/small.py", "--device=cpu"),
        files={
            **_IGNORED,
            "config/small.py": "n = 2\n",
            "train.py": script(
                "exec(open(sys.argv[1]).read())\nprint(n)\nos.makedirs('out', exist_ok=True)\nopen('out/a.ckpt', 'w').write('c')"
            ),
        },
    ),
    "results beside the script": Layout(
        command=("implementations/gan/gan.py",),
        cwd=".",
        files={
            "implementations/gan/gan.py": script(
                "os.makedirs('images', exist_ok=True)\nopen('images/0.png', 'w').write('p')\n"
                "os.makedirs('lightning_logs/version_0')\nopen('lightning_logs/version_0/metrics.csv', 'w').write('a')"
            )
        },
    ),
    "link to data elsewhere": Layout(
        command=("train.py",), files={"train.py": script(_READ), "data": "-> ../big", "../big/x.txt": "rows"}
    ),
    "tracked file that .gitignore names": Layout(
        command=("train.py",),
        tracked=("data/vocab.txt",),
        files={**_IGNORED, "data/vocab.txt": "v", "train.py": script("print(open('data/vocab.txt').read())\n" + _READ)},
    ),
    "shell script": Layout(
        command=("bash", "train.sh"),
        is_program=True,
        files={**_IGNORED, "train.sh": "set -e\npwd\npython src/train.py --a\n", "src/train.py": script(_READ)},
    ),
    "shell script of its own": Layout(
        command=("./scripts/run.sh",),
        is_program=True,
        files={**_IGNORED, "scripts/run.sh": "#!/bin/sh\npwd\ncat data/x.txt\nmkdir -p out\necho done > out/log.txt\n"},
    ),
    "program in Perl": Layout(
        command=("./train.pl", "3"),
        is_program=True,
        files={**_IGNORED, "train.pl": "#!/usr/bin/perl\nopen(F, 'data/x.txt'); print <F>, $ARGV[0], qq(\\n);\n"},
    ),
    "program that .gitignore names": Layout(
        command=("./train", "3"),
        is_program=True,
        files={".gitignore": "train\n", "train": "#!/bin/sh\necho $1\n", "a.txt": ""},
    ),
    "program of the machine": Layout(
        command=("sh", "-c", "cat data/x.txt; exit 3"), is_program=True, files={**_IGNORED}
    ),
    "starts another script": Layout(
        command=("train.py",),
        files={
            **_IGNORED,
            "train.py": script("subprocess.run([sys.executable, 'tools/prepare.py'], check=True)"),
            "tools/prepare.py": _READ,
        },
    ),
    "processes of its own": Layout(
        command=("train.py",),
        files={
            "train.py": script(
                "import multiprocessing, part\nif __name__ == '__main__':\n"
                "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(part.twice, [1, 2]))"
            ),
            "part.py": "def twice(n): return 2 * n",
        },
    ),
    "exit code": Layout(command=("train.py",), files={"train.py": script("print('bad')\nsys.exit(3)")}),
    "looks for its files": Layout(
        command=("train.py",),
        files={
            **_IGNORED,
            "data/b/y.txt": "",
            "train.py": script(
                "print(sorted(glob.glob('data/**/*.txt', recursive=True)), [sorted(f) for _, _, f in os.walk('data')])"
            ),
        },
    ),
    "asks git": Layout(
        command=("train.py",),
        files={"train.py": script("print(subprocess.check_output(['git', 'log', '-1', '--format=%s'], text=True))")},
    ),
    "package named like results": Layout(
        command=("train.py",),
        is_git=False,
        files={
            "train.py": script("import runs.make\nprint(runs.make.N)"),
            "runs/__init__.py": "",
            "runs/make.py": "N = 6",
        },
    ),
    "hidden settings": Layout(
        command=("train.py",),
        is_git=False,
        files={
            "train.py": script("print(open('.config/a.toml').read(), open('.env').read())"),
            ".config/a.toml": "a = 1",
            ".env": "KEY=1",
        },
    ),
    "removes what it made": Layout(
        command=("train.py",),
        files={
            "train.py": script(
                "os.makedirs('tmp/a')\nshutil.rmtree('tmp')\nos.remove('old.txt')\nprint(os.path.exists('old.txt'))"
            ),
            "old.txt": "old",
        },
    ),
}
