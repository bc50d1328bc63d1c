"""The texts of a packaged service: Dockerfile, what is not sent to the engine, and what to do with the folder."""

from __future__ import annotations

from collections.abc import Sequence

DOCKERIGNORE = "README.md\nDockerfile\n.dockerignore\n**/__pycache__\n"


def dockerfile(base: str) -> str:
    """The Dockerfile. Packages first: they change less often than the model."""
    return f"""\
FROM {base}
WORKDIR /service
COPY requirements.txt constraints.txt ./
RUN python -m pip install --no-cache-dir -r requirements.txt -c constraints.txt
COPY --chown=65534:65534 . .
# Nothing is written below /service.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65534:65534
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["python", "start.py", "--check", "--port", "8000"]
CMD ["python", "start.py", "--host", "0.0.0.0", "--port", "8000"]
"""


def readme(name: str, models: Sequence[str], base: str) -> str:
    """What the folder is, and the commands that build and serve it."""
    return f"""\
# {name}

Serves {", ".join(models)}. Written by `paceline package`; neither Paceline nor the workspace is needed.

In a container (podman or docker), on {base}:

```sh
podman build -t {name.lower()} .
podman run --rm -p 8000:8000 -e PACELINE_KEY=a-long-random-key {name.lower()}
curl -H 'Authorization: Bearer a-long-random-key' -d '{{"data": []}}' http://localhost:8000/score
```

Without one, in an environment of its own:

```sh
python -m venv .venv
.venv/bin/pip install -r requirements.txt -c constraints.txt
.venv/bin/python start.py --port 8000
```

`start.py --help` has the options. `constraints.txt` has the exact versions of the run that made the model.
"""
